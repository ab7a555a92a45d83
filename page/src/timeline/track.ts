// A row of the drawing: parts in order of time, with sums over them so that any stretch is summed up at once.

import type { Parts } from "./scene";

export type TrackKind = "lines" | "host" | "gpu" | "stream";
export const HEIGHTS: Record<TrackKind, number> = { lines: 15, host: 18, gpu: 26, stream: 16 };

const NEARBY = 8;

export class Track {
  readonly height: number;
  y = 0;
  readonly count: number;
  /** Of each tone that occurs, the time of all parts up to each. */
  private sums: Map<number, Float64Array> | null = null;

  constructor(
    readonly kind: TrackKind,
    readonly rank: number,
    readonly lane: number,
    readonly label: string,
    readonly heading: string,
    readonly parts: Parts,
  ) {
    this.height = HEIGHTS[kind];
    this.count = parts.start.length;
  }

  /** The first part that ends after this time. */
  at(time: number, from = 0): number {
    const { end } = this.parts;
    let low = from;
    let high = this.count;
    // what is looked for is mostly near to where the last search ended
    for (let step = NEARBY; low + step < high; step *= 2) {
      if (end[low + step] > time) {
        high = low + step + 1;
        break;
      }
      low += step;
    }
    while (low < high) {
      const middle = (low + high) >> 1;
      if (end[middle] > time) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  /** The tone that takes most of the parts from `first` up to `last`, and how much of the time it and all take. */
  most(first: number, last: number): { tone: number; whole: number } {
    let tone = this.parts.tone[first];
    let longest = -1;
    let whole = 0;
    if (last - first <= NEARBY) {
      for (let part = first; part < last; part++) {
        const time = this.parts.end[part] - this.parts.start[part];
        whole += time;
        if (time > longest) [longest, tone] = [time, this.parts.tone[part]];
      }
      return { tone, whole };
    }
    this.sums ??= this.summed();
    for (const [one, sum] of this.sums) {
      const time = sum[last] - sum[first];
      whole += time;
      if (time > longest) [longest, tone] = [time, one];
    }
    return { tone, whole };
  }

  private summed(): Map<number, Float64Array> {
    const sums = new Map<number, Float64Array>();
    for (const tone of new Set(this.parts.tone)) {
      const sum = new Float64Array(this.count + 1);
      for (let part = 0; part < this.count; part++) {
        sum[part + 1] = sum[part] + (this.parts.tone[part] === tone ? this.parts.end[part] - this.parts.start[part] : 0);
      }
      sums.set(tone, sum);
    }
    return sums;
  }
}
