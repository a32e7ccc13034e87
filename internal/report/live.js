// Follows a run: the server sends its progress after each trial, what is proved after each block, and its end.
(() => {
  const $ = (id) => document.getElementById(id);
  const events = new EventSource(document.querySelector('.live').dataset.events);
  const on = (name, act) => events.addEventListener(name, (event) => act(JSON.parse(event.data)));
  const title = document.title;
  on('progress', (p) => {
    $('bar').max = Math.max(1, p.trials);
    $('bar').value = p.done;
    $('text').textContent = p.text;
    $('last').textContent = p.last;
    if ($('wanted')) {
      const [pause, on, stop] = $('wanted').elements;
      pause.hidden = p.wanted !== '';
      on.hidden = p.wanted === '';
      stop.hidden = p.wanted === 'stop';
    }
    document.title = Math.floor(100 * p.done / Math.max(1, p.trials)) + '% ' + title;
  });
  on('sofar', (part) => {
    const open = [...document.querySelectorAll('#sofar details')].map((d) => d.open);
    $('sofar').innerHTML = part; // the server has escaped it, and the policy runs no script in it
    document.querySelectorAll('#sofar details').forEach((d, i) => { d.open = open[i] || false; });
  });
  on('end', (end) => {
    events.close();
    $('end').hidden = end.complete;
    $('end').textContent = end.text;
    $('link').hidden = false;
    if ($('wanted')) $('wanted').hidden = true;
    if (end.complete) $('text').textContent = end.text;
  });
  events.addEventListener('error', () => {
    if (events.readyState === EventSource.CLOSED) return;
    $('text').textContent = 'No connection to slipstream serve. Trying again …';
  });
})();
