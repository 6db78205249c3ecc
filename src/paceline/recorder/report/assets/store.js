// The run's events, added up again from what columns.py wrote: for each rank, `spans` of
// things that do not overlap, sorted, so that what is visible is found by halving.

function addUp(distances) {
  const found = new Float64Array(distances.length);
  let sum = 0;
  for (let i = 0; i < distances.length; i++) found[i] = sum += distances[i];
  return found;
}

class Spans {
  constructor(items) { // [began, ended, index of the event]
    this.began = Float64Array.from(items, (item) => item[0]);
    this.ended = Float64Array.from(items, (item) => item[1]);
    this.event = Int32Array.from(items, (item) => item[2]);
  }
  // The span that covers a moment, give or take `slack`; -1 if none does.
  at(moment, slack) {
    const i = above(this.ended, moment - slack);
    return i < this.ended.length && this.began[i] <= moment + slack ? i : -1;
  }
}

// Rows of spans in which nothing overlaps; what finds no place in `most` rows shares the last.
function packed(items, most) {
  const rows = [], ends = [];
  for (const item of items) {
    let row = ends.findIndex((end) => end <= item[0]);
    if (row < 0) row = Math.min(ends.length, most - 1);
    (rows[row] ??= []).push(row in ends && ends[row] > item[0] ? [ends[row], Math.max(ends[row], item[1]), item[2]] : item);
    ends[row] = Math.max(ends[row] ?? 0, item[1]);
  }
  return rows.map((row) => new Spans(row));
}

class RankEvents {
  constructor(raw, span) {
    this.rank = raw.rank;
    this.host = raw.host;
    this.steps = { ...raw.steps, began: addUp(raw.steps.began) };
    this.buckets = { ...raw.buckets, launched: addUp(raw.buckets.launched) };
    this.calls = { ...raw.calls, began: addUp(raw.calls.began) };
    this.end = span;
    this.forward = this.passes("forward");
    this.backward = this.passes("backward");
    this.waits = this.allWaits();
    this.bucketRows = packed(this.flights(), 5);
    this.queueRows = this.bucketRows.map((row) => this.queued(row));
    this.callRows = packed(this.lasting(), 2);
    this.lasts = Float64Array.from(this.steps.began, (at, i) => this.stepEnd(i) - at);
  }
  stepEnd(i) {
    const { began, ended, forward } = this.steps;
    return i + 1 < began.length ? began[i + 1] : began[i] + Math.max(ended[i], forward[i], 1);
  }
  passes(which) {
    const { began, forward, backward, ended } = this.steps;
    const items = [];
    for (let i = 0; i < began.length; i++) {
      if (which === "forward" && forward[i] >= 0) items.push([began[i], began[i] + forward[i], i]);
      if (which === "backward" && backward[i] >= 0 && ended[i] >= 0) items.push([began[i] + backward[i], began[i] + ended[i], i]);
    }
    return new Spans(items);
  }
  // Where buckets were waited for; where no bucket says, the end of a backward that waited.
  allWaits() {
    const { launched, flight, waited, step } = this.buckets;
    const items = [], told = new Set();
    for (let i = 0; i < launched.length; i++) {
      if (waited[i] <= 0 || flight[i] < 0) continue;
      const end = launched[i] + flight[i];
      items.push([end - waited[i], end, i]);
      told.add(step[i]);
    }
    this.steps.number.forEach((number, i) => {
      const { began, ended, waited: all } = this.steps;
      if (!told.has(number) && all[i] > 0 && ended[i] >= 0) items.push([began[i] + ended[i] - all[i], began[i] + ended[i], -1]);
    });
    items.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
    let reached = 0; // two waits at once are one wait to look at
    const apart = [];
    for (const [from, to, i] of items) {
      if (to > reached) apart.push([Math.max(from, reached), to, i]);
      reached = Math.max(reached, to);
    }
    return new Spans(apart);
  }
  flights() {
    const { launched, flight } = this.buckets;
    return Array.from(launched, (at, i) => [at, flight[i] < 0 ? this.end : at + Math.max(1, flight[i]), i]);
  }
  queued(row) {
    const items = [];
    row.event.forEach((i, place) => {
      const from = Math.max(row.began[place] - this.buckets.queued[i], place ? row.ended[place - 1] : 0);
      items.push([Math.min(from, row.began[place]), row.began[place], i]);
    });
    return new Spans(items);
  }
  lasting() {
    const { began, lasted } = this.calls;
    return Array.from(began, (at, i) => [at, lasted[i] < 0 ? this.end : at + Math.max(1, lasted[i]), i]);
  }
  // The index of the step that a moment falls in; -1 before the first.
  stepAt(moment) {
    return above(this.steps.began, moment) - 1;
  }
}

class Store {
  constructor(raw) {
    this.span = Math.max(1, raw.span);
    this.names = raw.names;
    this.slow = raw.slow;
    this.ranks = raw.ranks.map((one) => new RankEvents(one, this.span));
    this.severalHosts = new Set(this.ranks.map((one) => one.host)).size > 1;
    this.last = new Map(raw.last.map(([number, rank]) => [number, rank]));
  }
  // All ranks' records of the same bucket in the same pass: [rank's place, index] each.
  together(place, i) {
    this.passes ??= this.allPasses();
    return this.passes.get(this.keys[place][i]);
  }
  allPasses() {
    const found = new Map();
    this.keys = this.ranks.map((one, place) => {
      const seen = new Map();
      return one.buckets.step.map((step, i) => {
        const name = `${step} ${one.buckets.bucket[i]}`;
        const nth = seen.get(name) ?? 0;
        seen.set(name, nth + 1);
        const key = `${name} ${nth}`;
        if (!found.has(key)) found.set(key, []);
        found.get(key).push([place, i]);
        return key;
      });
    });
    return found;
  }
  lastLaunch(place, i) {
    const all = this.together(place, i);
    let late = all[0];
    for (const one of all) {
      if (this.ranks[one[0]].buckets.launched[one[1]] > this.ranks[late[0]].buckets.launched[late[1]]) late = one;
    }
    return { rank: this.ranks[late[0]].rank, at: this.ranks[late[0]].buckets.launched[late[1]], of: all.length };
  }
  // A step of middle length that every rank has, for a first look; the longest for another.
  choose(rule) {
    const one = this.ranks.find((r) => r.rank === this.slow) ?? this.ranks[0];
    const order = Array.from(one.lasts.keys()).filter((i) => one.steps.ended[i] > 0);
    if (!order.length) return null;
    if (order.length > 1) order.pop(); // the last has no end
    order.sort((a, b) => one.lasts[a] - one.lasts[b]);
    const i = rule === "slowest" ? order[order.length - 1] : order[order.length >> 1];
    return { from: one.steps.began[i], to: one.stepEnd(i), number: one.steps.number[i] };
  }
}
