// The timeline: a lane for each rank, drawn on a canvas as large as the window on it. Only what is
// in view is drawn, and spans thinner than a pixel are drawn together.

const GUTTER = 86, AXIS = 40;

class Timeline {
  constructor(store) {
    this.store = store;
    this.canvas = document.getElementById("timeline");
    this.scroll = document.getElementById("scroll");
    this.spacer = document.getElementById("spacer");
    this.compact = store.ranks.length > 8;
    this.view = { from: 0, to: store.span };
    this.lane = 0; // chosen with the keys
    this.chosen = null; // {place, kind, i}
    this.drawn = 0;
    this.changed = () => {};
    this.lay();
  }

  lay() {
    const calls = this.store.ranks.some((one) => one.callRows.length);
    const most = Math.max(1, ...this.store.ranks.map((one) => one.bucketRows.length));
    let top = 4;
    this.lanes = this.store.ranks.map((events) => {
      const rows = this.compact ? 1 : most;
      const pass = this.compact ? 11 : 18, row = this.compact ? 4 : rows > 4 ? 8 : 13;
      const call = calls ? (this.compact ? 3 : 6) : 0;
      const lane = { events, top, pass, row, rows, call, height: pass + rows * (row + 1) + (call ? call + 1 : 0) + (this.compact ? 4 : 10) };
      top += lane.height;
      return lane;
    });
    this.total = top;
  }

  resize() {
    this.width = Math.max(320, this.scroll.clientWidth);
    const room = document.documentElement.classList.contains("paper") ? 1e9 : Math.max(160, innerHeight * 0.72);
    this.height = Math.min(AXIS + this.total, room);
    this.canvas.style.height = `${this.height}px`;
    this.spacer.style.height = `${Math.max(0, AXIS + this.total - this.height)}px`;
    fit(this.canvas, this.width, this.height);
    this.draw();
  }

  x(moment) {
    return GUTTER + ((moment - this.view.from) / (this.view.to - this.view.from)) * (this.width - GUTTER);
  }

  moment(x) {
    return this.view.from + ((x - GUTTER) / (this.width - GUTTER)) * (this.view.to - this.view.from);
  }

  show(from, to) {
    const wide = clamp(to - from, Math.min(20, this.store.span), this.store.span * 1.04);
    const middle = clamp((from + to) / 2, wide / 2 - this.store.span * 0.02, this.store.span * 1.02 - wide / 2);
    this.view = { from: middle - wide / 2, to: middle + wide / 2 };
    this.draw();
    this.changed();
  }

  zoom(factor, around = (this.view.from + this.view.to) / 2) {
    this.show(around - (around - this.view.from) * factor, around + (this.view.to - around) * factor);
  }

  pan(share) {
    const by = (this.view.to - this.view.from) * share;
    this.show(this.view.from + by, this.view.to + by);
  }

  showStep(from, to) {
    const rest = (to - from) * 0.12;
    this.show(from - rest, to + rest);
  }

  draw() {
    const ctx = this.canvas.getContext("2d");
    this.paint = paints(ctx);
    this.drawn = 0;
    ctx.fillStyle = this.paint.ground;
    ctx.fillRect(0, 0, this.width, this.height);
    const offset = AXIS - this.scroll.scrollTop;
    this.dense = this.stepWidth() < 7;
    this.column = Math.max(3, Math.round(2 * this.stepWidth())); // of whole steps, or nearly
    document.getElementById("mode").hidden = !this.dense;
    ctx.save();
    ctx.beginPath();
    ctx.rect(0, AXIS, this.width, this.height - AXIS);
    ctx.clip();
    if (!this.dense) this.stepLines(ctx);
    this.lanes.forEach((lane, place) => {
      const y = lane.top + offset;
      if (y + lane.height > AXIS && y < this.height) this.drawLane(ctx, lane, place, y);
    });
    ctx.restore();
    this.drawAxis(ctx);
    document.body.dataset.drawn = this.drawn;
  }

  // Pixels for a usual step in view.
  stepWidth() {
    const { began } = this.store.ranks[0].steps;
    const seen = above(began, this.view.to) - above(began, this.view.from);
    return seen < 2 ? Infinity : (this.width - GUTTER) / seen;
  }

  drawLane(ctx, lane, place, y) {
    const paint = this.paint;
    if (place === this.lane && document.activeElement === this.canvas) {
      ctx.fillStyle = paint.mark;
      ctx.fillRect(0, y - 3, this.width, lane.height - 2);
    }
    ctx.save();
    ctx.beginPath();
    ctx.rect(GUTTER, y - 3, this.width - GUTTER, lane.height);
    ctx.clip();
    if (this.dense) this.drawShares(ctx, lane, y);
    else this.drawEach(ctx, lane, y);
    this.outline(ctx, lane, place, y);
    ctx.restore();
    this.drawName(ctx, lane, y);
  }

  drawEach(ctx, lane, y) {
    const events = lane.events, paint = this.paint;
    this.spans(ctx, events.forward, y, lane.pass, paint.forward, this.compact ? null : () => "forward", paint.onForward);
    this.spans(ctx, events.backward, y, lane.pass, paint.backward, this.compact ? null : () => "backward", paint.onBar);
    this.spans(ctx, events.waits, y, lane.pass, paint.wait);
    let under = y + lane.pass + 1;
    events.bucketRows.forEach((row, i) => {
      const at = under + (this.compact ? 0 : i * (lane.row + 1));
      this.spans(ctx, events.queueRows[i], at + lane.row / 2 - 1, 2, paint.queued);
      this.spans(ctx, row, at, lane.row, paint.flight, lane.row < 12 ? null : (e) => this.bucketLabel(events, e), paint.onBar);
    });
    under += lane.rows * (lane.row + 1);
    for (const row of events.callRows) this.spans(ctx, row, under, lane.call, paint.call);
  }

  // From far away single steps cannot be seen: each column then shows its shares of the time.
  drawShares(ctx, lane, y) {
    const events = lane.events, paint = this.paint, rows = lane.rows * (lane.row + 1) - 1;
    const of = (lists) => this.shares(lists);
    const waits = of([events.waits]), forward = of([events.forward]), backward = of([events.backward]);
    const flights = of(events.bucketRows), calls = of(events.callRows);
    const bar = (c, top, height, fill) => {
      if (height < 0.2) return 0;
      ctx.fillStyle = fill;
      ctx.fillRect(GUTTER + c * this.column, top, this.column, height);
      this.drawn++;
      return height;
    };
    for (let c = 0; c < waits.length; c++) {
      let top = y + lane.pass;
      const wait = Math.min(1, waits[c]), parts = [[forward[c], paint.forward], [Math.max(0, backward[c] - wait), paint.backward], [wait, paint.waitInk]];
      for (const [share, fill] of parts) top -= bar(c, top - share * lane.pass, share * lane.pass, fill);
      bar(c, y + lane.pass + 1, Math.min(1, flights[c]) * rows, paint.flight);
      bar(c, y + lane.pass + 1 + rows + 1, Math.min(1, calls[c]) * lane.call, paint.call);
    }
  }

  shares(lists) {
    const { from, to } = this.view, count = Math.ceil((this.width - GUTTER) / this.column);
    const wide = ((to - from) * this.column) / (this.width - GUTTER), found = new Float64Array(count);
    for (const list of lists) {
      for (let i = above(list.ended, from); i < list.began.length && list.began[i] < to; i++) {
        const began = Math.max(0, list.began[i] - from), ended = list.ended[i] - from;
        for (let c = Math.floor(began / wide); c < count && c * wide < ended; c++) {
          found[c] += (Math.min(ended, (c + 1) * wide) - Math.max(began, c * wide)) / wide;
        }
      }
    }
    return found;
  }

  drawName(ctx, lane, y) {
    const events = lane.events, paint = this.paint;
    ctx.fillStyle = events.rank === this.store.slow ? paint.waitInk : paint.ink;
    ctx.font = `${this.compact ? 11 : 13}px system-ui, sans-serif`;
    ctx.textBaseline = "middle";
    ctx.textAlign = "left";
    ctx.fillText(`rank ${events.rank}`, 10, y + lane.pass / 2 + 0.5);
    if (this.store.severalHosts && !this.compact) {
      ctx.fillStyle = paint.faint;
      ctx.font = "11px system-ui, sans-serif";
      ctx.fillText(shortened(ctx, events.host, GUTTER - 16), 10, y + lane.pass + 9);
    }
  }

  bucketLabel(events, e) {
    return `${events.buckets.bucket[e]} · ${sizeText(events.buckets.nbytes[e])}`;
  }

  // One row of spans. Thin neighbours become one block; wide ones keep a gap to their right.
  spans(ctx, list, y, height, fill, label, ink) {
    const { from, to } = this.view;
    let start = -1, end = -1;
    const flush = () => {
      if (start >= 0) { ctx.fillRect(start, y, Math.max(1, end - start), height); this.drawn++; }
      start = -1;
    };
    ctx.fillStyle = fill;
    for (let i = above(list.ended, from); i < list.began.length && list.began[i] < to; i++) {
      const x0 = Math.max(GUTTER - 1, this.x(list.began[i])), x1 = Math.min(this.width + 1, this.x(list.ended[i]));
      if (x1 - x0 < 2) {
        if (start >= 0 && x0 - end > 0.7) flush();
        if (start < 0) start = x0;
        end = Math.max(x1, x0 + 0.5);
        continue;
      }
      flush();
      ctx.fillRect(x0, y, x1 - x0 - 0.6, height);
      this.drawn++;
      if (label && x1 - x0 > 34) { this.label(ctx, label(list.event[i]), x0, x1, y, height, ink); ctx.fillStyle = fill; }
    }
    flush();
  }

  label(ctx, text, x0, x1, y, height, ink) {
    ctx.font = `${height > 15 ? 11.5 : 10.5}px system-ui, sans-serif`;
    if (ctx.measureText(text).width > x1 - x0 - 8) return;
    ctx.fillStyle = ink;
    ctx.textBaseline = "middle";
    ctx.textAlign = "left";
    ctx.fillText(text, x0 + 4, y + height / 2 + 0.5);
  }

  outline(ctx, lane, place, y) {
    if (!this.chosen || this.chosen.place !== place) return;
    const { from, to, top, height } = this.chosen;
    ctx.strokeStyle = this.paint.ink;
    ctx.lineWidth = 2;
    ctx.strokeRect(this.x(from) - 1, y + top - 1, Math.max(3, this.x(to) - this.x(from)) + 2, height + 2);
    ctx.lineWidth = 1;
  }

  stepLines(ctx) {
    const one = this.store.ranks[0].steps;
    const first = Math.max(0, above(one.began, this.view.from) - 1);
    ctx.fillStyle = this.paint.line;
    let before = -1e9;
    for (let i = first; i < one.began.length && one.began[i] < this.view.to; i++) {
      const x = this.x(one.began[i]);
      if (x >= GUTTER && x - before > 8) { ctx.fillRect(Math.round(x), AXIS, 1, this.height); before = x; }
    }
  }

  drawAxis(ctx) {
    const paint = this.paint;
    ctx.fillStyle = paint.raised;
    ctx.fillRect(0, 0, this.width, AXIS);
    ctx.fillStyle = paint.line;
    ctx.fillRect(0, AXIS - 1, this.width, 1);
    ctx.font = "11.5px system-ui, sans-serif";
    ctx.textBaseline = "middle";
    ctx.fillStyle = paint.faint;
    ctx.textAlign = "left";
    ctx.fillText("time", 10, 11);
    ctx.fillText("step", 10, 29);
    const { found, step } = ticks(this.view.from, this.view.to, (this.width - GUTTER) / 110);
    ctx.textAlign = "center";
    for (const moment of found) {
      const x = this.x(moment);
      if (x > GUTTER + 18 && x < this.width - 26) ctx.fillText(momentText(moment, step, this.view.to), x, 11);
    }
    this.stepNumbers(ctx);
  }

  stepNumbers(ctx) {
    const one = this.store.ranks[0].steps, first = Math.max(0, above(one.began, this.view.from) - 1);
    ctx.textAlign = "left";
    let before = -1e9;
    for (let i = first; i < one.began.length && one.began[i] < this.view.to; i++) {
      const x = Math.max(GUTTER, this.x(one.began[i]));
      const crowded = x - before < 56 || (i === first && this.x(one.began[i + 1] ?? 1e18) - x < 56);
      if (crowded && (i > first || x === GUTTER)) continue; // what began out of view gives way
      if (x > this.width - 30) break;
      ctx.fillStyle = this.paint.ink;
      ctx.fillText(one.number[i], x + 4, 29);
      ctx.fillStyle = this.paint.line;
      ctx.fillRect(Math.round(x), 21, 1, AXIS - 22);
      before = x;
    }
  }

  // What lies under a point of the canvas.
  find(x, y) {
    const inside = y - AXIS + this.scroll.scrollTop;
    const place = this.lanes.findIndex((lane) => inside >= lane.top - 3 && inside < lane.top + lane.height - 3);
    if (place < 0 || x < GUTTER || y < AXIS) return null;
    const lane = this.lanes[place], events = lane.events, at = inside - lane.top;
    const moment = this.moment(x), slack = (2 * (this.view.to - this.view.from)) / this.width;
    if (at < lane.pass + 1) return this.findPass(place, moment, slack);
    const under = at - lane.pass - 1, depth = lane.rows * (lane.row + 1);
    const call = under >= depth;
    const rows = call ? events.callRows : this.compact ? events.bucketRows : [events.bucketRows[Math.floor(under / (lane.row + 1))]];
    for (const row of rows) {
      const i = row ? row.at(moment, slack) : -1;
      if (i >= 0) return { place, kind: call ? "call" : "bucket", i: row.event[i] };
    }
    return null;
  }

  findPass(place, moment, slack) {
    const events = this.lanes[place].events;
    const wait = events.waits.at(moment, slack);
    if (wait >= 0 && events.waits.event[wait] >= 0) return { place, kind: "bucket", i: events.waits.event[wait] };
    const i = events.stepAt(moment);
    if (i < 0 || moment > events.stepEnd(i)) return null;
    const within = moment - events.steps.began[i];
    const { forward, backward, ended } = events.steps;
    const part = within <= forward[i] ? "forward" : backward[i] >= 0 && within >= backward[i] && within <= ended[i] ? "backward" : "rest";
    return { place, kind: part, i };
  }
}

function shortened(ctx, text, width) {
  let shown = text;
  while (shown.length > 3 && ctx.measureText(shown).width > width) shown = `${shown.replace("…", "").slice(0, -1)}…`;
  return shown;
}

// A canvas with as many pixels as the screen has for it.
function fit(canvas, width, height) {
  const scale = Math.min(3, devicePixelRatio || 1);
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  canvas.getContext("2d").setTransform(scale, 0, 0, scale, 0, 0);
}

function paints(ctx) {
  const names = { ground: "ground", raised: "raised", ink: "ink", faint: "faint", line: "line", mark: "mark", forward: "forward", backward: "backward", queued: "queued", flight: "flight", call: "call", onBar: "on-bar", onForward: "on-forward", waitInk: "wait", accent: "accent" };
  const found = Object.fromEntries(Object.entries(names).map(([key, name]) => [key, colour(name)]));
  found.wait = hatched(ctx, colour("wait"), colour("wait-ground"));
  return found;
}

// Waiting is told by its stripes as well as by its colour.
function hatched(ctx, ink, ground) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const brush = tile.getContext("2d");
  brush.fillStyle = ground;
  brush.fillRect(0, 0, 6, 6);
  brush.strokeStyle = ink;
  brush.lineWidth = 2.4;
  brush.beginPath();
  for (const shift of [-6, 0, 6]) { brush.moveTo(shift, 6); brush.lineTo(shift + 6, 0); }
  brush.stroke();
  return ctx.createPattern(tile, "repeat");
}
