// Time of each step: a line for each rank, or, with many ranks, the band they lie in, their middle,
// and one rank of the reader's choice. Below it, who launched last.

const FEW = 8, LEFT = 62, RIGHT = 10, TOP = 12, STRIP = 12, HIGH = 262;

class StepChart {
  constructor(store, timeline, tip) {
    Object.assign(this, { store, timeline, tip });
    this.canvas = document.getElementById("chart");
    this.point = document.getElementById("point");
    this.measure = store.slow >= 0 ? "work" : "step"; // ranks in step differ only without waiting
    this.few = store.ranks.length <= FEW;
    this.chosen = Math.max(0, store.ranks.findIndex((one) => one.rank === store.slow));
    this.cursor = -1;
    this.align();
    this.controls();
  }

  // The same step of all ranks in one column, whatever each rank's log begins with.
  align() {
    const numbers = new Set();
    for (const one of this.store.ranks) one.steps.number.forEach((n, i) => { if (one.steps.ended[i] >= 0 && i + 1 < one.steps.number.length) numbers.add(n); });
    this.numbers = [...numbers].sort((a, b) => a - b);
    const column = new Map(this.numbers.map((n, c) => [n, c]));
    const values = (of) => this.store.ranks.map((one) => {
      const row = new Float64Array(this.numbers.length).fill(NaN);
      one.steps.number.forEach((n, i) => { if (column.has(n) && one.steps.ended[i] >= 0) row[column.get(n)] = of(one, i); });
      return row;
    });
    this.values = {
      step: values((one, i) => one.lasts[i]),
      work: values((one, i) => Math.max(0, one.lasts[i] - one.steps.waited[i])),
      waited: values((one, i) => one.steps.waited[i]),
    };
    this.bands = {};
  }

  band() {
    return (this.bands[this.measure] ??= this.makeBand(this.values[this.measure]));
  }

  makeBand(rows) {
    const low = [], middle = [], high = [];
    this.numbers.forEach((_, c) => {
      const seen = rows.map((row) => row[c]).filter((v) => !Number.isNaN(v)).sort((a, b) => a - b);
      low.push(seen[0]);
      middle.push(seen[seen.length >> 1]);
      high.push(seen[seen.length - 1]);
    });
    return { low, middle, high };
  }

  controls() {
    document.querySelector(`#measure [value=${this.measure}]`).checked = true;
    document.getElementById("measure").addEventListener("change", (e) => { this.measure = e.target.value; this.draw(); });
    const select = document.getElementById("chosen");
    document.getElementById("choosing").hidden = this.few;
    this.store.ranks.forEach((one, i) => select.append(new Option(String(one.rank), String(i))));
    select.value = String(this.chosen);
    select.addEventListener("change", () => { this.chosen = Number(select.value); this.legend(); this.draw(); });
    this.canvas.addEventListener("pointermove", (e) => this.hover(e));
    this.canvas.addEventListener("pointerleave", () => { this.tip.hide(); this.cursor = -1; this.draw(); });
    this.canvas.addEventListener("click", (e) => { this.hover(e); this.go(); });
    this.canvas.addEventListener("keydown", (e) => this.key(e));
    this.legend();
  }

  legend() {
    const items = this.few
      ? this.store.ranks.map((one, i) => [`--rank-${i}`, `rank ${one.rank}`])
      : [["--line", "all ranks"], ["--backward", "the middle one"], ["--rank-1", `rank ${this.store.ranks[this.chosen].rank}`]];
    const list = document.getElementById("lines");
    list.replaceChildren(...items.map(([name, text]) => {
      const item = document.createElement("li"), swatch = document.createElement("i");
      swatch.style.background = `var(${name})`;
      item.append(swatch, text);
      return item;
    }));
  }

  resize() {
    this.width = Math.max(320, this.canvas.clientWidth);
    fit(this.canvas, this.width, HIGH);
    this.draw();
  }

  x(column) {
    return LEFT + ((column + 0.5) / this.numbers.length) * (this.width - LEFT - RIGHT);
  }

  y(value) {
    const bottom = HIGH - 46 - STRIP;
    return bottom - (Math.min(value, this.top) / this.top) * (bottom - TOP);
  }

  // Up to the highest value, unless a few are so high that the rest would be flat.
  limit() {
    const all = this.band().high.filter((v) => v !== undefined).sort((a, b) => a - b);
    const most = all[all.length - 1] ?? 1, usual = all[Math.floor(all.length * 0.95)] ?? most;
    return Math.max(1, most > 3 * usual ? usual * 1.6 : most * 1.08);
  }

  draw() {
    const ctx = this.canvas.getContext("2d");
    ctx.fillStyle = colour("ground");
    ctx.fillRect(0, 0, this.width, HIGH);
    ctx.font = "11.5px system-ui, sans-serif";
    if (!this.numbers.length) return this.nothing(ctx);
    this.top = this.limit();
    this.axes(ctx);
    const rows = this.values[this.measure];
    if (this.few) rows.forEach((row, i) => this.line(ctx, row, colour(`rank-${i}`), 1.4));
    else this.drawBand(ctx, rows);
    this.tooHigh(ctx);
    this.strip(ctx);
    if (this.cursor >= 0) {
      ctx.fillStyle = colour("faint");
      ctx.fillRect(Math.round(this.x(this.cursor)), TOP, 1, HIGH - 32 - TOP);
    }
  }

  nothing(ctx) {
    ctx.fillStyle = colour("faint");
    ctx.textAlign = "center";
    ctx.fillText("fewer than two steps were recorded", this.width / 2, HIGH / 2);
  }

  axes(ctx) {
    ctx.textAlign = "right";
    ctx.textBaseline = "middle";
    const { found, step } = ticks(0, this.top, 4);
    for (const value of found) {
      const y = Math.round(this.y(value));
      ctx.fillStyle = colour("line");
      ctx.fillRect(LEFT, y, this.width - LEFT - RIGHT, 1);
      ctx.fillStyle = colour("faint");
      ctx.fillText(momentText(value, step, this.top), LEFT - 8, y);
    }
    ctx.textAlign = "center";
    const every = Math.max(1, Math.ceil(this.numbers.length / ((this.width - LEFT) / 70)));
    for (let c = 0; c < this.numbers.length; c += every) ctx.fillText(this.numbers[c], this.x(c), HIGH - 9);
    ctx.textAlign = "left";
    ctx.fillText("step", 4, HIGH - 9);
  }

  // One rank's line; where steps are closer than pixels, from the lowest to the highest of each pixel.
  line(ctx, row, ink, thick) {
    ctx.strokeStyle = ink;
    ctx.lineWidth = thick;
    ctx.lineJoin = "round";
    ctx.beginPath();
    let column = -1, low = 0, high = 0, open = false;
    const flush = () => {
      if (column < 0) return;
      if (open) ctx.lineTo(column, this.y(high));
      else ctx.moveTo(column, this.y(high));
      if (low !== high) ctx.lineTo(column, this.y(low));
      open = true;
      column = -1;
    };
    row.forEach((value, c) => {
      if (Number.isNaN(value)) { flush(); open = false; return; }
      const x = this.numbers.length > this.width ? Math.round(this.x(c)) : this.x(c);
      if (x !== column) { flush(); column = x; low = high = value; }
      low = Math.min(low, value);
      high = Math.max(high, value);
    });
    flush();
    ctx.stroke();
    if (row.length === 1 && !Number.isNaN(row[0])) ctx.strokeRect(this.x(0) - 2, this.y(row[0]) - 2, 4, 4);
  }

  drawBand(ctx, rows) {
    const { low, middle, high } = this.band();
    ctx.fillStyle = colour("line");
    ctx.beginPath();
    high.forEach((v, c) => (c ? ctx.lineTo(this.x(c), this.y(v)) : ctx.moveTo(this.x(c), this.y(v))));
    for (let c = low.length - 1; c >= 0; c--) ctx.lineTo(this.x(c), this.y(low[c]));
    ctx.fill();
    this.line(ctx, Float64Array.from(middle), colour("backward"), 1.4);
    this.line(ctx, rows[this.chosen], colour("rank-1"), 1.6);
  }

  tooHigh(ctx) {
    ctx.fillStyle = colour("wait");
    this.band().high.forEach((v, c) => {
      if (v <= this.top) return;
      const x = this.x(c);
      ctx.beginPath();
      ctx.moveTo(x, TOP - 8);
      ctx.lineTo(x + 4, TOP - 1);
      ctx.lineTo(x - 4, TOP - 1);
      ctx.fill();
    });
  }

  strip(ctx) {
    const top = HIGH - 32 - STRIP, wide = (this.width - LEFT - RIGHT) / this.numbers.length;
    if (!this.store.last.size) return;
    ctx.fillStyle = colour("faint");
    ctx.textAlign = "right";
    ctx.textBaseline = "middle";
    ctx.fillText("came last", LEFT - 6, top + STRIP / 2);
    const inks = this.store.ranks.map((one, i) => this.few ? colour(`rank-${i}`) : i === this.chosen ? colour("rank-1") : colour("line"));
    const place = new Map(this.store.ranks.map((one, i) => [one.rank, i]));
    this.numbers.forEach((number, c) => {
      if (!this.store.last.has(number)) return;
      ctx.fillStyle = inks[place.get(this.store.last.get(number))];
      ctx.fillRect(LEFT + c * wide, top, wide > 3 ? wide - 0.7 : Math.max(wide, 0.5), STRIP);
    });
  }

  hover(e) {
    if (!this.numbers.length) return;
    const box = this.canvas.getBoundingClientRect();
    const share = (e.clientX - box.left - LEFT) / (this.width - LEFT - RIGHT);
    this.cursor = clamp(Math.floor(share * this.numbers.length), 0, this.numbers.length - 1);
    this.draw();
    this.tip.show(this.told(), e.clientX, e.clientY);
  }

  told() {
    const c = this.cursor, number = this.numbers[c], lines = [`step ${number}`];
    const say = (one, i) => `rank ${one.rank}: ${timeText(this.values.step[i][c])}, of it waiting ${timeText(this.values.waited[i][c])}`;
    const shown = this.few ? this.store.ranks.map((one, i) => [one, i]) : [[this.store.ranks[this.chosen], this.chosen]];
    for (const [one, i] of shown) if (!Number.isNaN(this.values.step[i][c])) lines.push(say(one, i));
    const { low, middle, high } = this.band();
    if (!this.few) lines.push(`all: ${timeText(low[c])} to ${timeText(high[c])}, the middle ${timeText(middle[c])}`);
    if (this.store.last.has(number)) lines.push(`rank ${this.store.last.get(number)} launched last`);
    return lines;
  }

  key(e) {
    const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20 }[e.key];
    if (by && this.numbers.length) {
      e.preventDefault();
      this.cursor = clamp(this.cursor + by, 0, this.numbers.length - 1);
      this.draw();
      this.point.textContent = this.told().join(" · ");
    } else if (e.key === "Enter") this.go();
  }

  go() {
    const number = this.numbers[this.cursor];
    const one = this.store.ranks.find((r) => r.steps.number.includes(number));
    if (!one) return;
    const i = one.steps.number.indexOf(number);
    this.timeline.showStep(one.steps.began[i], one.stepEnd(i));
    document.getElementById("told").textContent = `step ${number}`;
    document.getElementById("time").scrollIntoView({ block: "start" });
    this.tip.hide();
  }
}
