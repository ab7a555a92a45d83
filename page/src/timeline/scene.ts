// One view of the iterations: as recorded, without the recorder, or with fixes made; and the tracks that draw it.

import { busy, type Busy } from "../run/busy";
import { byLane } from "../run/block";
import { apply, together } from "../run/edit";
import { launchOf, steady } from "../run/replay";
import type { Moment } from "../run/run";
import { Kind, LinkKind, NONE, firstMarks, isCommand, numbered, ranksOf, type Lane, type Timeline } from "../run/timeline";
import { kernel } from "../words";
import { Track, type TrackKind } from "./track";

export interface Scene {
  moment: Moment;
  timeline: Timeline;
  /** Of each row of this view, which row of the moment it is; and back, NONE where a fix took it away. */
  base: Int32Array;
  here: Int32Array;
  /** Nanoseconds since the first iteration began. */
  start: Float64Array;
  end: Float64Array;
  length: number;
  /** After so long it all begins anew; 0 where it does not. */
  around: number;
  iterations: { start: number; number: number }[];
  busy: Busy | null;
  /** The time of an iteration, or of the whole script. */
  step: number;
  tracks: Track[];
  fixed: number[];
  /** Rows of streams and the rows that wait for them by an event. */
  events: [from: number, to: number][];
  /** The same where a data race says that it must be so, and nothing sees to it. */
  missing: [first: number, second: number][];
}

/** As it was recorded: slower than it runs alone, for recording takes time of its own. */
export function recorded(moment: Moment): Scene {
  const { timeline } = moment;
  const every = numbered(timeline.rows);
  const { start, end } = timeline;
  return scene(moment, timeline, every, start.slice(), end.slice(), 1, null, [], 0);
}

/** Replayed: with these fixes of the plan, or with none. */
export function replayed(moment: Moment, fixes: number[]): Scene {
  const edits = fixes.flatMap((fix) => moment.fixes[fix] ?? []);
  const every = numbered(moment.timeline.rows);
  const { timeline, row } = edits.length ? apply(moment.timeline, together(edits, moment.timeline.rows)) : { timeline: moment.timeline, row: every };
  const done = steady(timeline);
  const around = timeline.once ? 0 : done.pace * firstMarks(timeline).length * moment.ratio;
  const spent = busy(timeline, done, moment.ratio);
  const made = scene(moment, timeline, row, done.start.slice(), done.end.slice(), moment.ratio, spent, fixes, around);
  made.step = Math.min(moment.analysis.step, Math.round(done.pace * moment.ratio));
  return made;
}

function scene(
  moment: Moment,
  timeline: Timeline,
  base: Int32Array,
  start: Float64Array,
  end: Float64Array,
  ratio: number,
  spent: Busy | null,
  fixed: number[],
  around: number,
): Scene {
  const marks = [...firstMarks(timeline)];
  const zero = marks.length ? start[marks[0]] : Math.min(0, ...start);
  for (let row = 0; row < timeline.rows; row++) {
    start[row] = (start[row] - zero) * ratio;
    end[row] = (end[row] - zero) * ratio;
  }
  bringSideLanesBack(timeline, start, end);
  const here = new Int32Array(moment.timeline.rows).fill(NONE);
  base.forEach((one, row) => (here[one] = row));
  let length = 0;
  for (let row = 0; row < timeline.rows; row++) length = Math.max(length, end[row]);
  const iterations = marks.map((row, number) => ({ start: start[row], number: number + 1 }));
  const view: Scene = { moment, timeline, base, here, start, end, length, around, iterations, busy: spent, step: 0, tracks: [], fixed, events: eventsOf(moment, timeline, base), missing: [] };
  view.missing = moment.missing.map(([first, second]): [number, number] => [here[first], here[second]]).filter((rows) => !rows.includes(NONE));
  view.tracks = tracksOf(view);
  return view;
}

/** Two copies of one direction share a copy engine, and wait for each other as well: that is no event of the program's. */
function eventsOf(moment: Moment, { links, lane, kind }: Timeline, base: Int32Array): [number, number][] {
  const found: [number, number][] = [];
  for (let link = 0; link < links.kind.length; link++) {
    const [source, target] = [links.source[link], links.target[link]];
    if (links.kind[link] !== LinkKind.ORDER || lane[source] === lane[target] || !isCommand(kind[source]) || source > target) continue;
    const copies = kind[source] === Kind.COPY && kind[target] === Kind.COPY;
    if (!copies || moment.direction[base[source]] !== moment.direction[base[target]]) found.push([source, target]);
  }
  return found;
}

/** When what released a row lets it go on: a sync goes on at its end. */
export const arrival = ({ timeline, start, end }: Scene, row: number): number => (isCommand(timeline.kind[row]) || timeline.kind[row] !== Kind.SYNC ? start[row] : end[row]);

/** What workers prepare runs ahead of everything in a replay, for nothing holds it up; it is drawn where it is used. */
function bringSideLanesBack(timeline: Timeline, start: Float64Array, end: Float64Array): void {
  timeline.lanes.forEach((lane, index) => {
    if (!lane.name.startsWith("side stream") || lane.device !== null) return;
    let first = Infinity;
    for (let row = 0; row < timeline.rows; row++) if (timeline.lane[row] === index) first = Math.min(first, start[row]);
    for (let row = 0; row < timeline.rows; row++) {
      if (timeline.lane[row] !== index) continue;
      start[row] -= first;
      end[row] -= first;
    }
  });
}

/** The name of a span as people read it. */
export function spanName(moment: Moment, row: number): string {
  return isCommand(moment.timeline.kind[row]) ? kernel(moment.names[moment.name[row]]) : moment.names[moment.name[row]];
}

function rowsOfLanes(timeline: Timeline): Int32Array[] {
  const order = byLane(timeline.lane);
  let at = 0;
  return timeline.lanes.map((_, lane) => {
    const first = at;
    while (at < order.length && timeline.lane[order[at]] === lane) at++;
    return order.subarray(first, at);
  });
}

function tracksOf(view: Scene): Track[] {
  const { timeline } = view;
  const rows = rowsOfLanes(timeline);
  const marks = new Set(timeline.marks);
  const ranks = ranksOf(timeline);
  const launch = launchOf(timeline);
  const iteration = iterationsOf(timeline);
  const visit = visitsOf(view);
  const tracks: Track[] = [];
  for (const rank of ranks) {
    const lanes = timeline.lanes.flatMap((lane, index) => (lane.rank === rank && rows[index].length ? [index] : []));
    const of = (host: boolean) => lanes.filter((index) => (timeline.lanes[index].device === null) === host);
    const heading = ranks.length > 1 ? `rank ${rank}` : "";
    const add = (kind: TrackKind, label: string, lane: number, parts: Parts, boxes: Track | null = null) => {
      if (!parts.what.length) return;
      const first = heading && !tracks.some((track) => track.rank === rank);
      tracks.push(new Track(kind, rank, lane, label, first ? heading : "", parts, boxes));
    };
    for (const index of of(true)) {
      const lane = timeline.lanes[index];
      const main = rows[index].some((row) => marks.has(row));
      if (!lane.name.startsWith("side stream") && lane.name !== "loader workers") {
        add("lines", main ? "your lines" : "called from", index, bands(view, rows[index], view.moment.place));
      }
      add("host", hostName(lane.name, main), index, spans(view, rows[index]));
    }
    add("gpu", "GPU", NONE, deviceAsOne(view, lanes));
    for (const index of of(false)) {
      const parts = spans(view, rows[index]);
      const label = streamName(timeline.lanes[index], roleOf(view, rows[index]));
      const { boxes, runs } = boxesOf(view, parts, launch, iteration, visit);
      add("stream", label, index, parts, new Track("stream", rank, index, label, "", boxes, new Track("stream", rank, index, label, "", runs)));
    }
  }
  return tracks;
}

const SIDE: Record<string, string> = {
  "side stream: fetch": "copied ahead",
  "side stream: return": "copied back later",
  "side stream: wire": "sent meanwhile",
  "side stream: workers": "by workers",
};

function hostName(name: string, main: boolean): string {
  if (SIDE[name]) return SIDE[name];
  if (name === "loader workers") return "loader workers";
  return main ? "Python" : name.includes("autograd") ? "backward thread" : "other thread";
}

const LONGEST_NAME = 19;

/** `copies`, `side (copies)`, `stream 8 (copies)`, `default (compute)`. */
function streamName({ name, number }: Lane, role: string): string {
  if (SIDE[name] || name === role) return SIDE[name] ?? name;
  const whole = `${name || `stream ${number}`} (${role})`;
  return whole.length <= LONGEST_NAME ? whole : `${name.replace(/ stream$/, "")} (${role})`;
}

/** What a stream does most of its time. */
function roleOf({ timeline, start, end }: Scene, rows: Int32Array): string {
  const times = { compute: 0, copies: 0, comm: 0 };
  for (const row of rows) {
    const kind = timeline.kind[row];
    times[isWire(kind) ? "comm" : isCopying(kind) ? "copies" : "compute"] += end[row] - start[row];
  }
  return (Object.keys(times) as (keyof typeof times)[]).reduce((one, other) => (times[other] > times[one] ? other : one));
}

export interface Parts {
  start: Float64Array;
  end: Float64Array;
  tone: Uint8Array;
  /** A row of the view; of a line's band, its place. */
  what: Int32Array;
}

/** Rows at their times, and where the GPU is behind the host, once more at the beginning: the iterations before were alike. */
interface Occurrences {
  row: Int32Array;
  start: Float64Array;
  end: Float64Array;
}

const MOST_AROUND = 12;

function occurrences(view: Scene, rows: Int32Array, begin: Float64Array = view.start): Occurrences {
  const { around, end } = view;
  const again: [row: number, shift: number][] = [];
  if (around > 0) {
    for (const row of rows) for (let iteration = 1; end[row] > iteration * around && iteration < MOST_AROUND; iteration++) again.push([row, iteration * around]);
  }
  const count = rows.length + again.length;
  const found = { row: new Int32Array(count), start: new Float64Array(count), end: new Float64Array(count) };
  let ordered = true;
  for (let at = 0; at < count; at++) {
    const [row, shift] = at < again.length ? again[at] : [rows[at - again.length], 0];
    found.row[at] = row;
    found.start[at] = begin[row] - shift;
    found.end[at] = end[row] - shift;
    ordered &&= at === 0 || found.start[at] >= found.start[at - 1];
  }
  if (ordered) return found;
  const { row, start, end: ends } = found;
  const order = numbered(count).sort((one, other) => start[one] - start[other] || row[one] - row[other]);
  return { row: order.map((at) => row[at]), start: new Float64Array(order).map((at) => start[at]), end: new Float64Array(order).map((at) => ends[at]) };
}

function spans(view: Scene, rows: Int32Array): Parts {
  const { row, start, end } = occurrences(view, rows);
  const tone = new Uint8Array(row.length);
  for (let at = 0; at < row.length; at++) tone[at] = view.timeline.kind[row[at]];
  return { start, end, tone, what: row };
}

/** Neighbouring rows of one value as one band. */
function bands(view: Scene, rows: Int32Array, values: Int32Array): Parts {
  const start: number[] = [];
  const end: number[] = [];
  const what: number[] = [];
  const found = occurrences(view, rows);
  found.row.forEach((row, at) => {
    const value = values[view.base[row]];
    if (value === NONE) return;
    const last = what.length - 1;
    if (last >= 0 && what[last] === value && found.start[at] - end[last] < 1) end[last] = Math.max(end[last], found.end[at]);
    else {
      start.push(found.start[at]);
      end.push(found.end[at]);
      what.push(value);
    }
  });
  const tone = Uint8Array.from(what, (value) => value % 2);
  return { start: new Float64Array(start), end: new Float64Array(end), tone, what: new Int32Array(what) };
}

/** Of each row, how many iterations have begun. */
function iterationsOf(timeline: Timeline): Int32Array {
  const begun = new Int32Array(timeline.rows);
  for (const row of timeline.marks) begun[row] = 1;
  for (let row = 1; row < timeline.rows; row++) begun[row] += begun[row - 1];
  return begun;
}

/** Of each row, how often its thread has come to a line: its rows there, until another line has rows, are one visit. */
function visitsOf({ timeline, base, moment }: Scene): Int32Array {
  const visit = new Int32Array(timeline.rows);
  const at = timeline.lanes.map(() => ({ place: NONE, number: 0 }));
  for (let row = 0; row < timeline.rows; row++) {
    const place = moment.place[base[row]];
    const its = at[timeline.lane[row]];
    if (place !== NONE && place !== its.place) [its.place, its.number] = [place, its.number + 1];
    visit[row] = its.number;
  }
  return visit;
}

/** The tone of a box that is mostly idle. */
export const SPARSE = 255;

class Growing {
  readonly start: number[] = [];
  readonly end: number[] = [];
  readonly tone: number[] = [];
  readonly what: number[] = [];

  get parts(): Parts {
    return { start: new Float64Array(this.start), end: new Float64Array(this.end), tone: new Uint8Array(this.tone), what: new Int32Array(this.what) };
  }
}

/**
 * Neighbours on a stream that one line launched in one iteration. And what each of these boxes is made of: a run of its
 * line each, or if all its commands are alike each of them.
 */
function boxesOf({ base, moment }: Scene, { start, end, tone, what }: Parts, launch: Int32Array, iteration: Int32Array, visit: Int32Array): { boxes: Parts; runs: Parts } {
  const found = new Growing();
  const runs = new Growing();
  const first: number[] = [];
  let before = NONE;
  let busy = 0;
  for (let part = 0; part < what.length; part++) {
    const by = launch[what[part]];
    const place = by === NONE ? NONE : moment.place[base[by]];
    const last = found.what.length - 1;
    const isSame = last >= 0 && found.what[last] === place && iteration[by] === before;
    busy = (isSame ? busy : 0) + end[part] - start[part];
    if (isSame) {
      found.end[last] = Math.max(found.end[last], end[part]);
      found.tone[last] = 2 * busy < found.end[last] - found.start[last] ? SPARSE : tone[part];
    } else {
      found.start.push(start[part]);
      found.end.push(end[part]);
      found.tone.push(tone[part]);
      found.what.push(place);
      first.push(part);
    }
    before = by === NONE ? NONE : iteration[by];
  }
  first.forEach((from, box) => {
    const until = first[box + 1] ?? what.length;
    const name = (part: number) => moment.name[base[what[part]]];
    const run = (part: number) => (launch[what[part]] === NONE ? NONE : visit[launch[what[part]]]);
    let alike = true;
    for (let part = from; part < until; part++) alike &&= name(part) === name(from);
    for (let part = from; part < until; part++) {
      if (part > from && !alike && run(part) === run(part - 1)) runs.end[runs.end.length - 1] = Math.max(runs.end[runs.end.length - 1], end[part]);
      else {
        runs.start.push(start[part]);
        runs.end.push(end[part]);
        runs.tone.push(found.tone[box]);
        runs.what.push(found.what[box]);
      }
    }
  });
  return { boxes: found.parts, runs: runs.parts };
}

/** Tones of a GPU: at work, gaps by their cause, and copies and collectives that a cause says should run beside. */
export const GPU = { COMPUTING: 0, COPYING: 1, WIRE: 2, GAP: 16, ASIDE: 40 };

export const isGap = (tone: number): boolean => tone >= GPU.GAP && tone < GPU.ASIDE;
/** Which cause a tone speaks of, or NONE. */
export const causeOf = (tone: number): number => (tone >= GPU.ASIDE ? tone - GPU.ASIDE : tone >= GPU.GAP ? tone - GPU.GAP : NONE);

/** All lanes of a rank's device as one: computing before copying before the wire, and gaps by their cause between. */
function deviceAsOne(view: Scene, lanes: number[]): Parts {
  const { timeline, base, moment } = view;
  const mine = new Set(lanes);
  const own = timeline.lanes.map((_, lane) => mine.has(lane));
  const rows = numbered(timeline.rows).filter((row) => own[timeline.lane[row]] && isCommand(timeline.kind[row]));
  // of a collective only its end is the wire; before that it waits for its peers
  const begin = view.start.slice();
  for (const row of rows) if (timeline.kind[row] === Kind.COLLECTIVE) begin[row] = Math.max(begin[row], view.end[row] - timeline.work[row] * moment.ratio);
  const ordered = occurrences(view, rows, begin);
  const sideLane = timeline.lanes.map((lane) => lane.name.startsWith("side stream"));
  const toneOf = (row: number) => {
    const kind = timeline.kind[row];
    if (isComputing(kind)) return GPU.COMPUTING;
    const aside = sideLane[timeline.lane[row]] ? NONE : moment.aside[base[row]];
    return aside !== NONE ? GPU.ASIDE + aside : kind === Kind.COLLECTIVE ? GPU.WIRE : GPU.COPYING;
  };
  let taken = new Intervals();
  for (const part of [isComputing, isCopying, isWire]) {
    const tones = new Set<number>();
    for (const row of rows) if (part(timeline.kind[row])) tones.add(toneOf(row));
    for (const tone of tones) taken = merge(taken, merged(ordered, (row) => part(timeline.kind[row]) && toneOf(row) === tone, tone));
  }
  const reasonOf = (row: number): number => {
    const one = base[row];
    const cause = moment.cause[one];
    if (cause === NONE) return view.busy ? moment.causes.length - 1 : moment.causes.length;
    const fixedNow = view.fixed.some((fix) => moment.analysis.plan[fix]?.causes.includes(moment.causes[cause]));
    return fixedNow ? moment.rest[one] : cause;
  };
  const all = new Intervals();
  let reached = view.around > 0 ? 0 : Infinity;
  for (let at = 0; at < taken.count; at++) {
    const { row, start, end } = taken;
    if (start[at] > reached) all.add(row[at], reached, start[at], GPU.GAP + reasonOf(row[at]));
    all.add(row[at], start[at], end[at], taken.tone[at]);
    reached = Math.max(Number.isFinite(reached) ? reached : 0, end[at]);
  }
  return { start: new Float64Array(all.start), end: new Float64Array(all.end), tone: new Uint8Array(all.tone), what: new Int32Array(all.row) };
}

const isWire = (kind: number): boolean => kind === Kind.COLLECTIVE;
const isCopying = (kind: number): boolean => kind === Kind.COPY || kind === Kind.FILL;
const isComputing = (kind: number): boolean => !isWire(kind) && !isCopying(kind);

/** Stretches of time in order, a column each: as objects, a million of them would keep the browser collecting them. */
class Intervals {
  readonly row: number[] = [];
  readonly start: number[] = [];
  readonly end: number[] = [];
  readonly tone: number[] = [];

  get count(): number {
    return this.row.length;
  }

  add(row: number, start: number, end: number, tone: number): void {
    this.row.push(row);
    this.start.push(start);
    this.end.push(end);
    this.tone.push(tone);
  }

  take(other: Intervals, at: number): void {
    this.add(other.row[at], other.start[at], other.end[at], other.tone[at]);
  }
}

/** Those that touch are one. */
function merged({ row, start, end }: Occurrences, counts: (row: number) => boolean, tone: number): Intervals {
  const found = new Intervals();
  for (let at = 0; at < row.length; at++) {
    if (!counts(row[at])) continue;
    const last = found.count - 1;
    if (last >= 0 && start[at] <= found.end[last]) found.end[last] = Math.max(found.end[last], end[at]);
    else found.add(row[at], start[at], end[at], tone);
  }
  return found;
}

/** Both in order, the second only where the first leaves room. */
function merge(first: Intervals, second: Intervals): Intervals {
  const both = new Intervals();
  let at = 0;
  for (let one = 0; one < second.count; one++) {
    let from = second.start[one];
    while (at < first.count && first.start[at] <= from) both.take(first, at++);
    if (at) from = Math.max(from, first.end[at - 1]);
    while (from < second.end[one]) {
      const wall = at < first.count ? first.start[at] : Infinity;
      if (wall > from) both.add(second.row[one], from, Math.min(second.end[one], wall), second.tone[one]);
      if (wall >= second.end[one]) break;
      from = first.end[at];
      both.take(first, at++);
    }
  }
  while (at < first.count) both.take(first, at++);
  return both;
}
