// Replay, as keepbusy.timeline.replay does it: every span put where its releases allow it, to the nanosecond. The tests
// hold the two against each other span by span. Times are whole numbers below 2^53, so doubles are exact.

import { EVERY_LANE, Kind, LinkKind, NONE, firstMarks, isCommand, previousOnLane, type Timeline } from "./timeline";

const PENDING_LIMIT = 1022;
const TURNS = 12;
const MOST_ROWS = 400_000;
/** Before anything began. In Python it is -2^62; what is compared with it is far above either. */
export const NEVER = -(2 ** 52);
const CONTINUED = -2;

export interface Replayed {
  start: Float64Array;
  end: Float64Array;
  /** Nanoseconds an iteration, by the lane that advances most slowly. */
  pace: number;
  slowest: number;
}

/** The rows replayed until the run is steady; the times are those of the last round. */
export function steady(timeline: Timeline): Replayed {
  const engine = (rounds: number): Engine => {
    const made = new Engine(timeline, rounds);
    for (let round = 0; round < rounds; round++) made.round();
    return made;
  };
  if (timeline.once) return once(timeline, engine(1));
  const iterations = Math.max(1, firstMarks(timeline).length);
  const wanted = Math.ceil(TURNS / iterations) + 1;
  const most = Math.floor(MOST_ROWS / Math.max(1, timeline.rows));
  const rounds = Math.max(2, Math.min(wanted, Math.max(3, most)));
  const done = engine(rounds);
  return { start: done.start, end: done.end, ...slowestOf(paces(done.progress, rounds)) };
}

export function replay(timeline: Timeline): { start: Float64Array; end: Float64Array } {
  const engine = new Engine(timeline, 1);
  engine.round();
  return { start: engine.start, end: engine.end };
}

function once(timeline: Timeline, done: Engine): Replayed {
  const first = new Float64Array(timeline.lanes.length).fill(Infinity);
  let began = Infinity;
  for (let row = 0; row < timeline.rows; row++) if (done.end[row] > NEVER / 2) began = Math.min(began, done.start[row]);
  const lasted = first.fill(0);
  for (let row = 0; row < timeline.rows; row++) {
    if (done.end[row] > NEVER / 2) lasted[timeline.lane[row]] = Math.max(lasted[timeline.lane[row]], done.end[row] - began);
  }
  return { start: done.start, end: done.end, ...slowestOf(lasted) };
}

/** Of each lane, nanoseconds an iteration, between the same mark of two rounds. */
function paces(progress: Float64Array[], rounds: number): Float64Array {
  const aRound = Math.floor(progress.length / rounds);
  const last = progress.length - 1;
  const first = last - Math.max(1, rounds - Math.max(1, Math.floor(rounds / 3)) - 1) * aRound;
  return progress[first].map((from, lane) => (from > NEVER / 2 ? progress[last][lane] - from : 0) / (last - first));
}

function slowestOf(each: Float64Array): { pace: number; slowest: number } {
  let slowest = 0;
  for (let lane = 1; lane < each.length; lane++) if (each[lane] > each[slowest]) slowest = lane;
  return { pace: each[slowest] ?? 0, slowest };
}

/** Which links come into each row: those of row r stand at `first[r]` up to `first[r + 1]` of `link`. */
export function incoming(timeline: Timeline): { first: Int32Array; link: Int32Array } {
  return grouped(timeline.links.target, timeline.rows);
}

export function outgoing(timeline: Timeline): { first: Int32Array; link: Int32Array } {
  return grouped(timeline.links.source, timeline.rows);
}

function grouped(rows: Int32Array, count: number): { first: Int32Array; link: Int32Array } {
  const first = new Int32Array(count + 1);
  for (const row of rows) first[row + 1]++;
  for (let row = 0; row < count; row++) first[row + 1] += first[row];
  const next = first.slice(0, count);
  const link = new Int32Array(rows.length);
  for (let index = 0; index < rows.length; index++) link[next[rows[index]]++] = index;
  return { first, link };
}

/** Of each launch, the lane of its first command; NONE for every other row. */
function launchedLane(timeline: Timeline): Int32Array {
  const lane = new Int32Array(timeline.rows).fill(NONE);
  const { source, target, kind } = timeline.links;
  for (let link = source.length - 1; link >= 0; link--) {
    if (kind[link] === LinkKind.LAUNCH) lane[source[link]] = timeline.lane[target[link]];
  }
  return lane;
}

/** The launch of each command, or NONE. */
export function launchOf(timeline: Timeline): Int32Array {
  const launch = new Int32Array(timeline.rows).fill(NONE);
  const { source, target, kind } = timeline.links;
  for (let link = 0; link < source.length; link++) if (kind[link] === LinkKind.LAUNCH) launch[target[link]] = source[link];
  return launch;
}

/** Of each row: where its launches go; of a command that its stream's queue counts with the one before, CONTINUED. */
function launches(timeline: Timeline): Int32Array {
  const lanes = launchedLane(timeline);
  const launch = launchOf(timeline);
  const before = previousOnLane(timeline.lane, timeline.lanes.length);
  for (let row = 0; row < timeline.rows; row++) {
    const above = before[row] === NONE ? NONE : launch[before[row]];
    if (launch[row] !== NONE && launch[row] === above) lanes[row] = CONTINUED;
  }
  return lanes;
}

/** A lane begins where its first span was, unless something else released that span. */
function firstClocks(timeline: Timeline): Float64Array {
  const clocks = new Float64Array(timeline.lanes.length).fill(NEVER);
  const released = new Uint8Array(timeline.rows);
  const { source, target } = timeline.links;
  for (let link = 0; link < source.length; link++) {
    if (source[link] < target[link] && timeline.kind[target[link]] !== Kind.SYNC) released[target[link]] = 1;
  }
  const seen = new Uint8Array(timeline.lanes.length);
  for (let row = 0; row < timeline.rows; row++) {
    const lane = timeline.lane[row];
    if (!seen[lane] && !released[row]) clocks[lane] = timeline.start[row] - timeline.lag[row];
    seen[lane] = 1;
  }
  return clocks;
}

class Engine {
  readonly start: Float64Array;
  readonly end: Float64Array;
  readonly progress: Float64Array[] = [];
  private readonly clocks: Float64Array;
  private readonly launches: Int32Array;
  private readonly into: { first: Int32Array; link: Int32Array };
  private readonly marked: Uint8Array;
  private readonly limit: number;
  private readonly rings: Float64Array[];
  private readonly places: Int32Array;
  private readonly neighbours: number[][];
  private readonly members: Int32Array;
  private readonly here: number[][];

  constructor(private readonly timeline: Timeline, rounds: number) {
    const lanes = timeline.lanes.length;
    this.start = new Float64Array(timeline.rows).fill(NEVER);
    this.end = new Float64Array(timeline.rows).fill(NEVER);
    this.clocks = firstClocks(timeline);
    this.launches = launches(timeline);
    this.into = incoming(timeline);
    this.marked = new Uint8Array(timeline.rows);
    for (const row of firstMarks(timeline)) this.marked[row] = 1;
    const commands = new Int32Array(lanes);
    let met = 0;
    for (let row = 0; row < timeline.rows; row++) {
      if (isCommand(timeline.kind[row])) commands[timeline.lane[row]]++;
      met = Math.max(met, timeline.meeting[row] + 1);
    }
    this.limit = Math.min(timeline.pending || PENDING_LIMIT, rounds * Math.max(0, ...commands) + 1);
    this.rings = Array.from(commands, (held) => new Float64Array(held ? this.limit : 0).fill(NEVER));
    this.places = new Int32Array(lanes);
    this.neighbours = timeline.lanes.map((lane) =>
      timeline.lanes.flatMap((other, index) => (other.device !== null && other.rank === lane.rank ? [index] : [])),
    );
    this.members = new Int32Array(met);
    for (const meeting of timeline.meeting) if (meeting >= 0) this.members[meeting]++;
    this.here = Array.from({ length: met }, () => []);
  }

  /** Every row once. */
  round(): void {
    const { timeline, clocks, start, end, rings, places, limit, launches } = this;
    const { lane: laneOf, kind: kindOf, work, lag, awaits: awaitsOf, meeting: meetingOf, links } = timeline;
    const { first, link: linkOf } = this.into;
    for (let row = 0; row < timeline.rows; row++) {
      if (this.marked[row]) this.progress.push(clocks.slice());
      const lane = laneOf[row];
      const begin = clocks[lane] + lag[row];
      let reached = begin;
      for (let at = first[row]; at < first[row + 1]; at++) {
        const link = linkOf[at];
        const source = links.source[link];
        const released = (links.kind[link] === LinkKind.LAUNCH ? start[source] : end[source]) + links.lag[link];
        if (released > reached) reached = released;
      }
      const kind = kindOf[row];
      const awaits = awaitsOf[row];
      if (kind >= Kind.KERNEL) {
        start[row] = reached;
        if (kind === Kind.COLLECTIVE && meetingOf[row] >= 0) {
          this.meet(row, lane, launches[row] !== CONTINUED);
          continue;
        }
        if (launches[row] !== CONTINUED) places[lane] = places[lane] + 1 < limit ? places[lane] + 1 : 0;
        rings[lane][(places[lane] || limit) - 1] = reached + work[row];
      } else if (kind === Kind.SYNC || awaits !== NONE) {
        start[row] = begin;
        if (awaits >= 0 && clocks[awaits] > reached) reached = clocks[awaits];
        else if (awaits === EVERY_LANE) for (const other of this.neighbours[lane]) reached = Math.max(reached, clocks[other]);
      } else {
        start[row] = reached;
        const queue = launches[row];
        if (queue >= 0 && rings[queue][places[queue]] > reached) reached = rings[queue][places[queue]];
      }
      end[row] = clocks[lane] = reached + work[row];
    }
  }

  /** A part of a collective has come; after the last one all leave, in the order in which they came. */
  private meet(row: number, lane: number, queued: boolean): void {
    const meeting = this.timeline.meeting[row];
    this.places[lane] = (this.places[lane] + (queued ? 1 : 0)) % this.limit;
    const here = this.here[meeting];
    here.push(row);
    if (here.length < this.members[meeting]) return;
    let last = NEVER * 2;
    for (const part of here) last = Math.max(last, this.start[part]);
    for (const part of here) {
      const its = this.timeline.lane[part];
      const finish = last + this.timeline.work[part];
      this.end[part] = this.clocks[its] = this.rings[its][(this.places[its] || this.limit) - 1] = finish;
    }
    this.here[meeting] = [];
  }
}
