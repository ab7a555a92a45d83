// How a turn is spent on the device, as keepbusy.explain.ledger counts it: the last round laid on a circle as long as it.

import type { Replayed } from "./replay";
import { Kind, firstMarks, isCommand, ranksOf, type Timeline } from "./timeline";

/** A turn, the mean of the ranks. Together with `waiting` it is the whole turn. */
export interface Busy {
  step: number;
  computing: number;
  copying: number;
  wire: number;
  waiting: number;
}

export function busy(timeline: Timeline, replayed: Replayed, ratio: number): Busy {
  const turns = Math.max(1, firstMarks(timeline).length);
  const ranks = ranksOf(timeline);
  const sums = [0, 0, 0];
  for (const rank of ranks) shares(timeline, replayed, rank, turns).forEach((share, place) => (sums[place] += share));
  const [computing, copying, wire] = sums.map((sum) => (sum / ranks.length / turns) * ratio);
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

function shares(timeline: Timeline, { start, end, pace }: Replayed, rank: number, turns: number): number[] {
  const mine = timeline.lanes.map((lane) => lane.rank === rank);
  const commands = Int32Array.from(timeline.lane.keys()).filter((row) => mine[timeline.lane[row]] && isCommand(timeline.kind[row]));
  const reached = PLACES.map((counts) => {
    const rows = commands.filter((row) => counts(timeline.kind[row]));
    // of a collective only its end is the wire; before that it waits for its peers
    const begin = Float64Array.from(rows, (row) => (timeline.kind[row] === Kind.COLLECTIVE ? end[row] - timeline.work[row] : start[row]));
    return covered(begin, Float64Array.from(rows, (row) => end[row]), pace * turns);
  });
  return [reached[0], reached[1] - reached[0], reached[2] - reached[1]];
}

/** How much of a circle of this length the intervals cover together. */
function covered(start: Float64Array, end: Float64Array, around: number): number {
  if (!start.length || around <= 0) return 0;
  const pieces: [number, number][] = [];
  for (let index = 0; index < start.length; index++) {
    const length = Math.min(end[index] - start[index], around);
    const begin = ((start[index] % around) + around) % around;
    const over = Math.max(begin + length - around, 0);
    pieces.push([begin, begin + length - over]);
    if (over > 0) pieces.push([0, over]);
  }
  pieces.sort((one, other) => one[0] - other[0]);
  let sum = 0;
  let reached = 0;
  for (const [from, to] of pieces) {
    if (to > reached) sum += to - Math.max(from, reached);
    reached = Math.max(reached, to);
  }
  return sum;
}
