// The timeline as replay works on it: the columns of keepbusy.timeline.model, a number a row.

export const NONE = -1;
export const EVERY_LANE = -2;

export const Kind = { WORK: 0, LAUNCH: 1, SYNC: 2, ALLOCATE: 3, RECORDING: 4, KERNEL: 8, COPY: 9, FILL: 10, COLLECTIVE: 11 };
export const LinkKind = { LAUNCH: 0, ORDER: 1, HANDOFF: 2 };

export type Numbers = Int8Array | Int16Array | Int32Array | Float64Array;

export interface Lane {
  rank: number;
  device: number | null;
  number: number;
  name: string;
}

export interface Links {
  source: Int32Array;
  target: Int32Array;
  kind: Numbers;
  lag: Numbers;
}

export interface Timeline {
  rows: number;
  lanes: Lane[];
  lane: Int32Array;
  kind: Numbers;
  start: Float64Array;
  end: Float64Array;
  work: Numbers;
  lag: Numbers;
  awaits: Int32Array;
  meeting: Int32Array;
  links: Links;
  marks: Int32Array;
  /** Commands that may be pending on a stream before a launch blocks; null where nobody knows. */
  pending: number | null;
  /** A script without iterations, which is replayed once. */
  once: boolean;
}

export const isCommand = (kind: number): boolean => kind >= Kind.KERNEL;

/** 0, 1, 2 … */
export function numbered(count: number): Int32Array {
  const rows = new Int32Array(count);
  for (let row = 0; row < count; row++) rows[row] = row;
  return rows;
}

/** What a column has in these rows. */
export function taken(column: Numbers, rows: Int32Array): Float64Array {
  const found = new Float64Array(rows.length);
  for (let at = 0; at < rows.length; at++) found[at] = column[rows[at]];
  return found;
}

export function ranksOf(timeline: Timeline): number[] {
  return [...new Set(timeline.lanes.map((lane) => lane.rank))].sort((one, other) => one - other);
}

/** Rows at which the iterations of the first rank begin. */
export function firstMarks(timeline: Timeline): Int32Array {
  const first = ranksOf(timeline)[0];
  return timeline.marks.filter((row) => timeline.lanes[timeline.lane[row]].rank === first);
}

/** Of each row, the row before it on its lane, or NONE. */
export function previousOnLane(lane: Int32Array, lanes: number): Int32Array {
  const last = new Int32Array(lanes).fill(NONE);
  const before = new Int32Array(lane.length);
  for (let row = 0; row < lane.length; row++) {
    before[row] = last[lane[row]];
    last[lane[row]] = row;
  }
  return before;
}
