// Searches in a page that no server can search.
(() => {
  const form = document.querySelector('form[data-here]');
  if (!form) return;
  form.hidden = false;
  const rows = [...document.querySelectorAll('tr[data-text]')];
  const count = document.getElementById('count');
  const all = count.textContent;
  const search = () => {
    const words = form.q.value.toLowerCase().split(/\s+/).filter(Boolean);
    const experiment = form.experiment.value;
    let shown = 0;
    for (const row of rows) {
      const hit = (!experiment || row.dataset.experiment === experiment) && words.every((w) => row.dataset.text.includes(w));
      row.hidden = !hit;
      if (hit) shown++;
    }
    count.textContent = words.length || experiment ? shown + ' of ' + rows.length + ' results on this page' : all;
  };
  form.addEventListener('input', search);
  form.addEventListener('submit', (event) => { event.preventDefault(); search(); });
})();
