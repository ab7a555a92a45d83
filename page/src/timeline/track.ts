// A row of the drawing: parts in order of time, with sums over them so that any stretch is summed up at once.

import type { Parts } from "./scene";

export type TrackKind = "lines" | "host" | "gpu" | "stream";
const HEIGHTS: Record<TrackKind, number> = { lines: 15, host: 18, gpu: 26, stream: 16 };
/** Where there are few. */
const TALL: Record<TrackKind, number> = { lines: 19, host: 26, gpu: 40, stream: 22 };

const NEARBY = 8;

export class Track {
  height: number;
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
    /** On a stream: what one line launched in one iteration; each part's `what` is its place. */
    readonly boxes: Track | null = null,
  ) {
    this.height = HEIGHTS[kind];
    this.count = parts.start.length;
  }

  get tall(): number {
    return TALL[this.kind];
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

  /** Of each tone, how long its parts last within this stretch, whose ends `first` and `last` are still to end there. */
  within(from: number, to: number, first = this.at(from), last = this.at(to)): [tone: number, time: number][] {
    this.sums ??= this.summed();
    const found: [number, number][] = [];
    for (const [tone, sum] of this.sums) {
      const time = this.upTo(to, last, tone, sum) - this.upTo(from, first, tone, sum);
      if (time > 0) found.push([tone, time]);
    }
    return found;
  }

  /** How long parts of a tone lasted up to this time, at which `part` is still to end. */
  private upTo(time: number, part: number, tone: number, sum: Float64Array): number {
    const open = part < this.count && this.parts.tone[part] === tone ? Math.max(0, time - this.parts.start[part]) : 0;
    return sum[part] + open;
  }

  private summed(): Map<number, Float64Array> {
    const sums = new Map<number, Float64Array>();
    for (const tone of [...new Set(this.parts.tone)].sort((one, other) => one - other)) {
      const sum = new Float64Array(this.count + 1);
      for (let part = 0; part < this.count; part++) {
        sum[part + 1] = sum[part] + (this.parts.tone[part] === tone ? this.parts.end[part] - this.parts.start[part] : 0);
      }
      sums.set(tone, sum);
    }
    return sums;
  }
}
