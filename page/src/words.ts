// How times, shares and sizes are written: as keepbusy.timeline.figures writes them.

const UNITS: [string, number][] = [["s", 1e9], ["ms", 1e6], ["µs", 1e3]];

const unitOf = (time: number): [string, number] => UNITS.find(([, size]) => Math.abs(time) >= size) ?? UNITS[2];

function figure(time: number, [unit, size]: [string, number]): string {
  const value = time / size;
  if (unit === "µs") return Math.abs(value) >= 10 ? value.toFixed(0) : value.toFixed(1);
  if (unit === "s" || Math.abs(value) < 0.095) return Math.abs(value) >= 0.005 ? value.toFixed(2) : value > 0 ? "<0.01" : "0";
  return Math.abs(value) >= 99.95 ? value.toFixed(0) : value.toFixed(1);
}

export function duration(time: number, like = 0): string {
  const unit = unitOf(like || time);
  return time ? `${figure(time, unit)} ${unit[0]}` : "0 ms";
}

/** Finer than a report writes it: `4.7177 ms`. */
export function exactDuration(time: number): string {
  const [unit, size] = unitOf(time);
  return `${Number((time / size).toPrecision(5))} ${unit}`;
}

export function range(low: number, high: number, like: number): string {
  const unit = unitOf(like);
  const [first, last] = [figure(low, unit), figure(high, unit)];
  return first === last ? first : `${first}–${last}`;
}

export function transition(before: number, after: number): string {
  const unit = unitOf(Math.max(before, after));
  return `${figure(before, unit)} → ${figure(after, unit)} ${unit[0]}`;
}

export function share(part: number, whole: number): string {
  const percent = whole ? (100 * part) / whole : 0;
  return percent > 0 && percent < 0.5 ? "<1%" : `${percent.toFixed(0)}%`;
}

export function change(before: number, after: number): string {
  const percent = before ? Math.round((100 * (after - before)) / before) : 0;
  if (!percent) return "the same";
  if (percent > 100) return `${(after / before).toFixed(1)}× as long`;
  return `${Math.abs(percent)}% ${percent < 0 ? "shorter" : "longer"}`;
}

export function bytes(size: number): string {
  for (const [unit, scale] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]] as const) {
    if (size >= scale) return `${Number((size / scale).toPrecision(3))} ${unit}`;
  }
  return `${size} bytes`;
}

export function times(count: number): string {
  if (count < 2 / 3) return `once in ${Math.round(1 / Math.max(count, 1e-3))} iterations`;
  const rounded = Math.round(count);
  return rounded === 1 ? "once per iteration" : rounded === 2 ? "twice per iteration" : `${rounded.toLocaleString("en")} times per iteration`;
}

export const plural = (count: number, word: string): string => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;

/** What stands between a sentence and a place, which may begin with a word of its own. */
export const leading = (place: string): string => (/^(near|about|in|between|after|before) /.test(place) ? " " : " at ");

/** What is too long loses its middle. */
export function shortened(text: string, limit: number): string {
  if (text.length <= limit) return text;
  const tail = Math.floor((limit - 1) / 2);
  return `${text.slice(0, limit - 1 - tail)}…${text.slice(text.length - tail)}`;
}

/** A kernel without its return type, its namespaces and its arguments. */
export function kernel(name: string): string {
  let text = name.replace(/^void /, "").replace(/\(anonymous namespace\)::/g, "");
  const angle = text.search(/[<(]/);
  if (angle > 0) text = text.slice(0, angle);
  return text.slice(text.lastIndexOf("::") + 1).replace(/^:/, "").trim() || name;
}
