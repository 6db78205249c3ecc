// What the page says about one thing in the timeline: a title, then one fact for each line.

function tellOf(store, found) {
  const events = store.ranks[found.place];
  if (found.kind === "bucket") return tellBucket(store, events, found);
  if (found.kind === "call") return tellCall(store, events, found.i);
  return tellPass(events, found);
}

function tellPass(events, { kind, i }) {
  const { number, began, forward, backward, ended, waited } = events.steps;
  const title = `rank ${events.rank} · step ${number[i]} · ${kind === "rest" ? "between passes" : kind}`;
  const lines = [title];
  if (kind === "rest") lines.push("outside the model: loss, optimizer, data");
  const parts = [`forward ${timeText(forward[i])}`];
  if (ended[i] >= 0) parts.push(`backward ${timeText(ended[i] - backward[i])}`);
  lines.push(parts.join(", "));
  if (ended[i] >= 0) lines.push(`waited ${timeText(waited[i])}`);
  if (i + 1 < began.length) lines.push(`whole step ${timeText(events.lasts[i])}`);
  return lines;
}

function tellBucket(store, events, { place, i }) {
  const { step, bucket, nbytes, launched, queued, flight, waited, line } = events.buckets;
  const lines = [`rank ${events.rank} · step ${step[i]} · bucket ${bucket[i]} · ${sizeText(nbytes[i])}`];
  lines.push(queued[i] > 0 ? `launched ${timeText(queued[i])} after it was full` : "launched as soon as it was full");
  lines.push(flight[i] < 0 ? "its end was not recorded" : `travelled ${timeText(flight[i])}`);
  lines.push(waited[i] > 0 ? `waited for: ${timeText(waited[i])}` : "nobody had to wait for it here");
  const late = store.lastLaunch(place, i);
  if (late.of > 1 && late.rank === events.rank) lines.push("this rank launched it last");
  else if (late.of > 1) lines.push(`rank ${late.rank} launched it last, ${timeText(late.at - launched[i])} after this one`);
  if (store.names[line[i]]) lines.push(store.names[line[i]]);
  return lines;
}

function tellCall(store, events, i) {
  const { operation, shape, line, error, nbytes, sequence, lasted } = events.calls;
  const lines = [`rank ${events.rank} · ${store.names[operation[i]]} · ${sizeText(nbytes[i])}`];
  if (store.names[shape[i]]) lines.push(store.names[shape[i]]);
  lines.push(lasted[i] < 0 ? "its end was not recorded" : `lasted ${timeText(lasted[i])}`);
  lines.push(`call ${sequence[i]} of its group`);
  for (const name of [line, error]) if (store.names[name[i]]) lines.push(store.names[name[i]]);
  return lines;
}

class Tip {
  constructor() {
    this.box = document.getElementById("tip");
  }
  show(lines, x, y) {
    this.box.replaceChildren();
    lines.forEach((text, i) => {
      const line = document.createElement(i ? "div" : "b");
      line.textContent = text;
      this.box.append(line);
    });
    this.box.hidden = false;
    const { offsetWidth: wide, offsetHeight: high } = this.box;
    this.box.style.left = `${clamp(x + 14, 4, Math.max(4, innerWidth - wide - 6))}px`;
    this.box.style.top = `${y + 18 + high > innerHeight ? Math.max(4, y - high - 12) : y + 18}px`;
  }
  hide() {
    this.box.hidden = true;
  }
}
