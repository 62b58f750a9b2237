// What a page needs beyond HTML and CSS: links open what they lead to, docstrings unfold,
// and whatever scrolls can be scrolled from the keyboard.
(() => {
  // A link to something folded opens it.
  const reveal = () => {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!target) return;
    const own = target.classList.contains("tag_checked") ? target.querySelector("details") : null;
    for (let e = own ?? target; e; e = e.parentElement) {
      if (e.tagName === "DETAILS") e.open = true;
      if (e.classList.contains("toggle-hidden")) e.querySelector(".toggle-button")?.click();
    }
    target.scrollIntoView();
  };

  // The rest of a docstring, behind its button.
  const unfold = (click) => {
    const button = click.target.closest("button.doc-more");
    if (!button) return;
    const open = button.getAttribute("aria-expanded") === "false";
    button.setAttribute("aria-expanded", open);
    let rest = button;
    while (!rest.matches(".doc-rest")) rest = rest.previousElementSibling;
    rest.hidden = !open;
  };

  // Boxes that are wider than the page take the focus, so that arrow keys move them.
  const wide = ".bd-article pre, .bd-article .cell_output, .bd-article .cell_output .output, "
    + ".bd-article div.math, .bd-article .drawing-box, "
    + ".bd-article mjx-container[display=true], .bd-article .pst-scrollable-table-container";
  const reach = () => document.querySelectorAll(wide).forEach((box) => {
    const scrolls = box.scrollWidth > box.clientWidth + 1
      && /auto|scroll/.test(getComputedStyle(box).overflowX);
    box.classList.toggle("scrolls", scrolls);
    if (scrolls) box.tabIndex = 0;
    else box.removeAttribute("tabindex");
  });

  addEventListener("DOMContentLoaded", () => {
    document.querySelectorAll(".doc-rest").forEach((rest) => { rest.hidden = true; });
    addEventListener("click", unfold);
    const article = document.querySelector(".bd-article");
    if (article) new ResizeObserver(reach).observe(article);
  });
  addEventListener("load", reveal);
  addEventListener("hashchange", reveal);
})();
