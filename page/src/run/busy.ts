// How an iteration is spent on the device, as keepbusy.explain.ledger counts it: the last round laid on a circle as long as it.

import type { Replayed } from "./replay";
import { Kind, firstMarks, isCommand, ranksOf, type Timeline } from "./timeline";

/** An iteration, the mean of the ranks. Together with `waiting` it is the whole iteration. */
export interface Busy {
  step: number;
  computing: number;
  copying: number;
  wire: number;
  waiting: number;
}

export function busy(timeline: Timeline, replayed: Replayed, ratio: number): Busy {
  const iterations = Math.max(1, firstMarks(timeline).length);
  const ranks = ranksOf(timeline);
  const sums = [0, 0, 0];
  for (const rank of ranks) shares(timeline, replayed, rank, iterations).forEach((share, place) => (sums[place] += share));
  const [computing, copying, wire] = sums.map((sum) => (sum / ranks.length / iterations) * ratio);
  const step = replayed.pace * ratio;
  const waiting = Math.max(0, Math.max(0, step - computing) - copying - wire);
  return { step, computing, copying, wire, waiting };
}

const COPYING: number[] = [Kind.COPY, Kind.FILL];
const PLACES = [
  (kind: number): boolean => !COPYING.includes(kind) && kind !== Kind.COLLECTIVE,
  (kind: number): boolean => kind !== Kind.COLLECTIVE,
  (): boolean => true,
];

function shares(timeline: Timeline, { start, end, pace }: Replayed, rank: number, iterations: number): number[] {
  const mine = timeline.lanes.map((lane) => lane.rank === rank);
  const { kind, lane, work } = timeline;
  const reached = PLACES.map((counts) => {
    const from: number[] = [];
    const to: number[] = [];
    for (let row = 0; row < timeline.rows; row++) {
      if (!mine[lane[row]] || !isCommand(kind[row]) || !counts(kind[row])) continue;
      // of a collective only its end is the wire; before that it waits for its peers. Who broadcasts may leave before they come
      from.push(kind[row] === Kind.COLLECTIVE ? end[row] - Math.max(work[row], 0) : start[row]);
      to.push(end[row]);
    }
    return covered(from, to, pace * iterations);
  });
  return [reached[0], reached[1] - reached[0], reached[2] - reached[1]];
}

/** How much of a circle of this length the intervals cover together. */
function covered(start: number[], end: number[], around: number): number {
  if (!start.length || around <= 0) return 0;
  const from: number[] = [];
  const to: number[] = [];
  for (let index = 0; index < start.length; index++) {
    const length = Math.min(end[index] - start[index], around);
    const begin = ((start[index] % around) + around) % around;
    const over = Math.max(begin + length - around, 0);
    from.push(begin);
    to.push(begin + length - over);
    if (over > 0) {
      from.push(0);
      to.push(over);
    }
  }
  // where more have begun than ended
  const [begun, ended] = [new Float64Array(from).sort(), new Float64Array(to).sort()];
  let sum = 0;
  for (let open = 0, over = 0, since = 0; over < ended.length; ) {
    if (open < begun.length && begun[open] <= ended[over]) {
      if (open === over) since = begun[open];
      open++;
    } else if (++over === open) sum += ended[over - 1] - since;
  }
  return sum;
}
