// Puts the page together, and again when the window, the colours or the paper change.

function sortable(table) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") !== "descending";
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const value = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
      const compare = (a, b) => (isNaN(value(a)) ? value(a).localeCompare(value(b)) : value(a) - value(b));
      const rows = [...table.tBodies[0].rows].sort((a, b) => (down ? compare(b, a) : compare(a, b)));
      table.tBodies[0].append(...rows);
    });
  });
}

function buttons(timeline, store) {
  const on = (id, act) => document.getElementById(id).addEventListener("click", act);
  const step = (rule) => () => {
    const found = store.choose(rule);
    if (found) timeline.showStep(found.from, found.to);
    else timeline.show(0, store.span);
  };
  on("typical", step("typical"));
  on("slowest", step("slowest"));
  on("whole", () => timeline.show(0, store.span));
  on("closer", () => timeline.zoom(0.6));
  on("farther", () => timeline.zoom(1 / 0.6));
  const compact = document.getElementById("compact");
  compact.checked = timeline.compact;
  compact.addEventListener("change", () => { timeline.compact = compact.checked; timeline.chosen = null; timeline.lay(); timeline.resize(); });
  step("typical")();
}

function start() {
  const store = new Store(JSON.parse(document.getElementById("data").textContent));
  const tip = new Tip();
  const timeline = new Timeline(store);
  const overview = new Overview(timeline);
  const chart = new StepChart(store, timeline, tip);
  const hands = new Hands(timeline, tip);
  const redraw = () => { timeline.resize(); overview.resize(); chart.resize(); };
  timeline.width = timeline.height = 320;
  redraw();
  timeline.changed = () => overview.draw();
  buttons(timeline, store);
  document.querySelectorAll("table").forEach(sortable);
  addEventListener("resize", redraw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  addEventListener("beforeprint", () => { document.documentElement.classList.add("paper"); redraw(); });
  addEventListener("afterprint", () => { document.documentElement.classList.remove("paper"); redraw(); });
  document.body.dataset.ready = "yes";
  return { store, timeline, overview, chart, hands };
}

start();
