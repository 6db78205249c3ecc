// Mouse, touch and keys on the timeline, and the overview above it.

class Hands {
  constructor(timeline, tip) {
    this.t = timeline;
    this.tip = tip;
    this.told = document.getElementById("told");
    this.guide = document.getElementById("guide"); // one moment on all ranks
    this.grip = null; // {x, from, to, marks} while a button is down
    const canvas = timeline.canvas;
    canvas.addEventListener("pointerdown", (e) => this.down(e));
    canvas.addEventListener("pointermove", (e) => this.move(e));
    canvas.addEventListener("pointerup", (e) => this.up(e));
    canvas.addEventListener("pointercancel", () => { this.grip = null; });
    canvas.addEventListener("pointerleave", () => this.leave());
    canvas.addEventListener("dblclick", (e) => this.toStep(e));
    canvas.addEventListener("wheel", (e) => this.wheel(e), { passive: false });
    canvas.addEventListener("keydown", (e) => this.key(e));
    for (const name of ["focus", "blur"]) canvas.addEventListener(name, () => timeline.draw());
    timeline.scroll.addEventListener("scroll", () => { timeline.draw(); this.leave(); });
    addEventListener("scroll", () => this.leave());
  }

  leave() {
    this.tip.hide();
    this.guide.hidden = true;
  }

  place(e) {
    const box = this.t.canvas.getBoundingClientRect();
    return [e.clientX - box.left, e.clientY - box.top];
  }

  down(e) {
    if (e.button) return;
    const [x] = this.place(e);
    this.t.canvas.setPointerCapture(e.pointerId);
    this.grip = { x, ...this.t.view, marks: e.shiftKey };
    this.tip.hide();
  }

  move(e) {
    const [x, y] = this.place(e);
    if (!this.grip) return this.hover(x, y, e);
    const t = this.t, wide = this.grip.to - this.grip.from;
    if (this.grip.marks) {
      t.draw();
      const ctx = t.canvas.getContext("2d");
      ctx.fillStyle = t.paint.mark;
      ctx.fillRect(this.grip.x, 0, x - this.grip.x, t.height);
      return;
    }
    const by = ((this.grip.x - x) / (t.width - GUTTER)) * wide;
    t.show(this.grip.from + by, this.grip.to + by);
  }

  up(e) {
    const grip = this.grip, [x] = this.place(e);
    this.grip = null;
    if (grip?.marks && Math.abs(x - grip.x) > 4) this.t.show(this.t.moment(Math.min(x, grip.x)), this.t.moment(Math.max(x, grip.x)));
  }

  hover(x, y, e) {
    const box = this.t.canvas.getBoundingClientRect();
    this.guide.hidden = x < GUTTER;
    Object.assign(this.guide.style, { left: `${e.clientX}px`, top: `${box.top + AXIS}px`, height: `${box.height - AXIS}px` });
    const found = this.t.find(x, y);
    if (found) this.tip.show(tellOf(this.t.store, found), e.clientX, e.clientY);
    else this.tip.hide();
  }

  wheel(e) {
    if (e.ctrlKey || e.metaKey) {
      e.preventDefault();
      this.t.zoom(Math.exp(clamp(e.deltaY, -100, 100) * 0.006), this.t.moment(Math.max(GUTTER, this.place(e)[0])));
    } else if (e.shiftKey || Math.abs(e.deltaX) > Math.abs(e.deltaY)) {
      e.preventDefault();
      this.t.pan((e.deltaX || e.deltaY) / this.t.width);
    }
    this.tip.hide();
  }

  toStep(e) {
    const [x] = this.place(e), events = this.t.store.ranks[0], i = events.stepAt(this.t.moment(x));
    if (i >= 0) this.t.showStep(events.steps.began[i], events.stepEnd(i));
  }

  key(e) {
    if (e.ctrlKey || e.metaKey || e.altKey) return;
    const acts = {
      ArrowLeft: () => this.t.pan(-0.15), ArrowRight: () => this.t.pan(0.15),
      "+": () => this.t.zoom(0.7), "=": () => this.t.zoom(0.7), "-": () => this.t.zoom(1 / 0.7),
      0: () => this.t.show(0, this.t.store.span),
      ArrowUp: () => this.rank(-1), ArrowDown: () => this.rank(1),
      n: () => this.step(1), p: () => this.step(-1), ".": () => this.bucket(1), ",": () => this.bucket(-1),
    };
    const act = acts[e.key] ?? acts[e.key.toLowerCase()];
    if (!act) return;
    e.preventDefault();
    this.leave();
    act();
  }

  say(lines) {
    this.told.textContent = lines.join(" · ");
  }

  rank(by) {
    const t = this.t;
    t.lane = clamp(t.lane + by, 0, t.lanes.length - 1);
    const lane = t.lanes[t.lane], room = t.height - AXIS;
    if (lane.top < t.scroll.scrollTop) t.scroll.scrollTop = lane.top - 4;
    if (lane.top + lane.height > t.scroll.scrollTop + room) t.scroll.scrollTop = lane.top + lane.height - room;
    t.draw();
    this.say([`rank ${lane.events.rank}`, `on ${lane.events.host}`, `${lane.events.steps.number.length} steps recorded`]);
  }

  step(by) {
    const t = this.t, events = t.lanes[t.lane].events, last = events.steps.began.length - 1;
    if (last < 0) return;
    const middle = (t.view.from + t.view.to) / 2;
    const now = this.chosenStep?.lane === t.lane ? this.chosenStep.i : events.stepAt(middle) - (by > 0 ? 1 : 0);
    const i = clamp(now + by, 0, last);
    this.chosenStep = { lane: t.lane, i };
    t.showStep(events.steps.began[i], events.stepEnd(i));
    this.say(tellPass(events, { kind: "backward", i }));
  }

  bucket(by) {
    const t = this.t, events = t.lanes[t.lane].events, all = events.buckets;
    if (!all.launched.length) return;
    const same = t.chosen?.place === t.lane;
    const now = same ? t.chosen.i : above(all.launched, t.view.from) - (by > 0 ? 1 : 0);
    const i = clamp(now + by, 0, all.launched.length - 1);
    const row = Math.max(0, events.bucketRows.findIndex((r) => r.event.includes(i)));
    const lane = t.lanes[t.lane], from = all.launched[i], to = from + Math.max(0, all.flight[i]);
    t.chosen = { place: t.lane, kind: "bucket", i, from, to, top: lane.pass + 1 + (t.compact ? 0 : row * (lane.row + 1)), height: lane.row };
    if (from < t.view.from || to > t.view.to) {
      const wide = Math.max(t.view.to - t.view.from, (to - from) * 2);
      t.show((from + to - wide) / 2, (from + to + wide) / 2);
    } else t.draw();
    this.say(tellBucket(t.store, events, { place: t.lane, i }));
  }
}

// The whole run in one strip: how much of each moment the ranks waited, and a frame around the view.
class Overview {
  constructor(timeline) {
    this.t = timeline;
    this.canvas = document.getElementById("overview");
    const go = (e) => { if (e.buttons) this.centre(e); };
    this.canvas.addEventListener("pointerdown", (e) => { this.canvas.setPointerCapture(e.pointerId); this.centre(e); });
    this.canvas.addEventListener("pointermove", go);
  }

  centre(e) {
    const box = this.canvas.getBoundingClientRect(), { view, store } = this.t;
    const wide = Math.min(view.to - view.from, store.span);
    const middle = ((e.clientX - box.left) / box.width) * store.span;
    this.t.show(middle - wide / 2, middle + wide / 2);
  }

  resize() {
    this.width = Math.max(320, this.canvas.clientWidth);
    fit(this.canvas, this.width, 46);
    this.shares = this.waitShares(Math.ceil(this.width / 3));
    this.draw();
  }

  waitShares(count) {
    const shares = new Float64Array(count), wide = this.t.store.span / count;
    for (const { waits } of this.t.store.ranks) {
      waits.began.forEach((from, i) => {
        const to = waits.ended[i];
        for (let c = Math.max(0, Math.floor(from / wide)); c < count && c * wide < to; c++) {
          shares[c] += (Math.min(to, (c + 1) * wide) - Math.max(from, c * wide)) / wide;
        }
      });
    }
    return shares.map((sum) => sum / this.t.store.ranks.length);
  }

  draw() {
    const ctx = this.canvas.getContext("2d"), { view, store } = this.t, wide = this.width;
    ctx.fillStyle = colour("raised");
    ctx.fillRect(0, 0, wide, 46);
    ctx.fillStyle = colour("wait");
    const column = wide / this.shares.length;
    this.shares.forEach((share, c) => ctx.fillRect(c * column, 45 - share * 26, column - 0.5, share * 26));
    const x0 = clamp((view.from / store.span) * wide, 0, wide), x1 = clamp((view.to / store.span) * wide, 0, wide);
    ctx.strokeStyle = colour("accent");
    ctx.lineWidth = 2;
    ctx.strokeRect(clamp(x0, 1, wide - 5), 17, Math.max(4, Math.min(x1, wide - 1) - Math.max(1, x0)), 28);
    ctx.fillStyle = colour("faint");
    ctx.font = "11.5px system-ui, sans-serif";
    ctx.textBaseline = "middle";
    ctx.textAlign = "left";
    ctx.fillText("whole run: share of the ranks that wait", 10, 9);
    ctx.textAlign = "right";
    ctx.fillText(timeText(store.span), wide - 10, 9);
  }
}
