// Numbers as people read them. Times inside the page are microseconds.

function three(value) {
  return value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

function timeText(us) {
  if (us >= 1e8) return `${Math.floor(us / 6e7)} min ${String(Math.floor((us / 1e6) % 60)).padStart(2, "0")} s`;
  if (us >= 1e6) return `${three(us / 1e6)} s`;
  if (us >= 1e3) return `${three(us / 1e3)} ms`;
  return `${Math.round(us)} µs`;
}

function sizeText(bytes) {
  for (const [factor, unit] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
    if (bytes >= factor) return `${three(bytes / factor)} ${unit}`;
  }
  return `${bytes} B`;
}

// About `count` round numbers between `from` and `to`, and the unit that suits them all.
function ticks(from, to, count) {
  const raw = (to - from) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw);
  const found = [];
  for (let i = Math.ceil(from / step); i * step <= to; i++) found.push(i * step);
  return { found, step };
}

// A moment on an axis that ends at `most` and has ticks `step` apart: digits that tell ticks apart.
function momentText(us, step, most) {
  const [factor, unit] = most >= 1e6 ? [1e6, "s"] : most >= 1e3 ? [1e3, "ms"] : [1, "µs"];
  const digits = Math.max(0, -Math.floor(Math.log10(step / factor) + 1e-9));
  return `${(us / factor).toFixed(digits)} ${unit}`;
}

// The first index whose value in a sorted column is above `value`.
function above(column, value) {
  let low = 0, high = column.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (column[middle] > value) high = middle;
    else low = middle + 1;
  }
  return low;
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function clamp(value, low, high) {
  return Math.min(high, Math.max(low, value));
}
