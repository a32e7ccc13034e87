// Shows at once, and under a finger too, what a bar is drawn from. Without this script the
// browser shows the same as the bar's title.
(() => {
  const tip = document.createElement('div');
  tip.className = 'tip';
  tip.hidden = true;
  document.body.append(tip);
  const place = (event) => {
    const room = document.documentElement.clientWidth - tip.offsetWidth - 8;
    const below = event.clientY + 18;
    const fits = below + tip.offsetHeight < window.innerHeight;
    tip.style.left = Math.max(8, Math.min(event.clientX + 12, room)) + 'px';
    tip.style.top = (fits ? below : event.clientY - tip.offsetHeight - 12) + 'px';
  };
  for (const bar of document.querySelectorAll('svg.bar')) {
    const title = bar.querySelector('title');
    const text = title.textContent;
    title.remove(); // or there would be two
    bar.setAttribute('aria-label', text);
    const cell = bar.closest('td');
    cell.addEventListener('pointerenter', (event) => {
      tip.textContent = text;
      tip.hidden = false;
      place(event);
    });
    cell.addEventListener('pointermove', place);
    cell.addEventListener('pointerleave', (event) => {
      tip.hidden = event.pointerType === 'mouse'; // a finger that is lifted has left
    });
  }
  document.addEventListener('pointerdown', (event) => {
    if (!event.target.closest('.barcell')) tip.hidden = true;
  });
  document.addEventListener('scroll', () => { tip.hidden = true; }, { passive: true });
})();
