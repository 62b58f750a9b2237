// Live charts without a mouse: arrow keys move from mark to mark, Enter clicks, Escape clears, and
// the chart's text names what its controls are set to.
(() => {
  const MARKS = ":is(.mark-symbol, .mark-rect).role-mark > path, .role-legend-symbol > path";
  const STEPS = {
    ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1],
  };
  const HELP = "Arrow keys, Home and End move between the marks, Enter selects, Escape clears.";

  const centre = (mark) => {
    const { x, y, width, height } = mark.getBoundingClientRect();
    return [x + width / 2, y + height / 2];
  };

  // The nearest mark in one direction; what lies to the side of it counts threefold.
  const nearest = (marks, from, [dx, dy]) => {
    const [x, y] = centre(from);
    let [best, least] = [from, Infinity];
    for (const mark of marks) {
      const [a, b] = centre(mark);
      const along = (a - x) * dx + (b - y) * dy;
      const far = along + 3 * Math.abs((a - x) * dy - (b - y) * dx);
      if (along > 0.5 && far < least) [best, least] = [mark, far];
    }
    return best;
  };

  const label = (mark) => mark.getAttribute("aria-label")
    ?? mark.closest(".role-legend-symbol").parentElement
      .querySelector(".role-legend-label text").textContent;

  const send = (mark, type) => {
    const [clientX, clientY] = centre(mark);
    const at = { bubbles: true, clientX, clientY };
    mark.dispatchEvent(type.startsWith("pointer")
      ? new PointerEvent(type, at) : new MouseEvent(type, at));
  };

  const bind = (chart) => {
    const frame = document.createElement("div");
    const line = document.createElement("p");
    let current = -1; // its place among the marks: Vega may draw the marks anew
    frame.className = "chart-at";
    line.className = "chart-said";
    line.setAttribute("aria-live", "polite");
    chart.append(frame, line);
    chart.tabIndex = 0;
    const marks = () => [...chart.querySelectorAll(MARKS)];

    const mark = (one) => {
      const [box, whole] = [one, chart].map((element) => element.getBoundingClientRect());
      frame.style.cssText = `left: ${box.x - whole.x - 3}px; top: ${box.y - whole.y - 3}px;`
        + `width: ${box.width + 6}px; height: ${box.height + 6}px; display: block`;
    };
    const clear = () => {
      const old = marks()[current];
      if (old) ["pointerout", "dblclick"].forEach((type) => send(old, type));
      frame.style.display = "none";
      current = -1;
    };

    chart.addEventListener("focus", () => { line.textContent = HELP; });
    chart.addEventListener("blur", () => { frame.style.display = "none"; line.textContent = ""; });
    chart.addEventListener("keydown", (event) => {
      const all = marks();
      const step = STEPS[event.key];
      if (event.target !== chart || !all.length) return;
      if (step || event.key === "Home" || event.key === "End") {
        const old = all[current];
        const next = event.key === "End" ? all.at(-1)
          : step && old ? nearest(all, old, step) : all[0];
        if (old) send(old, "pointerout");
        current = all.indexOf(next);
        send(next, "pointerover");
        mark(next);
        line.textContent = label(next);
      } else if (event.key === "Enter" && all[current]) {
        send(all[current], "click");
        line.textContent = `Selected: ${label(all[current])}`;
      } else if (event.key === "Escape") {
        clear();
        line.textContent = HELP;
      } else return;
      event.preventDefault();
    });

    // A screen reader hears what the sliders and menus of a chart are set to.
    const name = chart.getAttribute("aria-label"); // Vega's, from the description
    const follow = () => {
      const set = [...chart.querySelectorAll(".vega-bind")].map((control) => {
        const { value } = control.querySelector("input:checked, input:not([type=radio]), select");
        return `${control.querySelector(".vega-bind-name").textContent.trim()} ${value}`;
      });
      chart.setAttribute("aria-label", `${[name, ...set].join(", ")}. ${HELP}`);
    };
    chart.addEventListener("input", follow);
    chart.addEventListener("pointerup", () => setTimeout(follow, 50)); // where the chart is dragged
    follow();
  };

  document.addEventListener("live", ({ target }) => bind(target.querySelector(".moving")));
})();
