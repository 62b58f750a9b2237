// Hover cards: while a link has the pointer or the focus, what it leads to is shown beside it.
// The card stays while the pointer is on it, and Escape closes it.
(() => {
  const WAIT = 250; // milliseconds before a card opens under the pointer, or closes

  addEventListener("DOMContentLoaded", () => {
    const cards = JSON.parse(document.getElementById("cards").textContent);
    const box = document.createElement("div");
    box.id = "hover-card";
    box.setAttribute("role", "tooltip");
    box.hidden = true;
    document.body.append(box);
    let link = null;
    let timer = 0;

    const close = () => {
      clearTimeout(timer);
      link?.removeAttribute("aria-describedby");
      link = null;
      box.hidden = true;
    };

    const place = () => {
      const target = link.getClientRects()[0];
      const below = target.bottom + 6;
      const fits = below + box.offsetHeight < innerHeight;
      const left = Math.min(target.left, document.documentElement.clientWidth - box.offsetWidth - 8);
      box.style.left = `${Math.max(8, left)}px`;
      box.style.top = `${fits ? below : Math.max(8, target.top - box.offsetHeight - 6)}px`;
    };

    const open = (next) => {
      close();
      link = next;
      box.innerHTML = cards[link.getAttribute("href")];
      box.hidden = false;
      place();
      link.setAttribute("aria-describedby", box.id);
    };

    const linkOf = (event) => {
      const found = event.target.closest?.(".bd-article a.internal");
      return found && found.getAttribute("href") in cards ? found : null;
    };

    addEventListener("mouseover", (event) => {
      clearTimeout(timer);
      const found = linkOf(event);
      if (found && found !== link) timer = setTimeout(open, WAIT, found);
      else if (link && !found && !box.contains(event.target)) timer = setTimeout(close, WAIT);
    });
    addEventListener("focusin", (event) => {
      const found = linkOf(event);
      if (found?.matches(":focus-visible")) open(found);
    });
    addEventListener("focusout", close);
    addEventListener("keydown", (event) => { if (event.key === "Escape") close(); });
    // Tab scrolls to the link that it reaches, after the card was opened.
    addEventListener("scroll", () => {
      if (link && link === document.activeElement) place();
      else close();
    }, { passive: true });
    addEventListener("click", (event) => { if (!box.contains(event.target)) close(); });
  });
})();
