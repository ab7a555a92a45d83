// What released a span and what it released, and the sentence that says so.

import { launchOf, incoming, outgoing } from "../run/replay";
import { EVERY_LANE, Kind, LinkKind, NONE, isCommand, previousOnLane, type Timeline } from "../run/timeline";
import { duration, exactDuration, leading } from "../words";
import type { Scene } from "./scene";
import { spanName } from "./scene";

export interface Release {
  row: number;
  why: "lane" | "launch" | "order" | "handoff" | "sync" | "meeting";
  time: number;
}

interface Known {
  into: { first: Int32Array; link: Int32Array };
  out: { first: Int32Array; link: Int32Array };
  before: Int32Array;
  launch: Int32Array;
  /** Of each lane, its last row. */
  last: Int32Array;
}

const known = new WeakMap<Timeline, Known>();

function lookups(timeline: Timeline): Known {
  let found = known.get(timeline);
  if (!found) {
    const before = previousOnLane(timeline.lane, timeline.lanes.length);
    const last = new Int32Array(timeline.lanes.length).fill(NONE);
    timeline.lane.forEach((lane, row) => (last[lane] = row));
    found = { into: incoming(timeline), out: outgoing(timeline), before, launch: launchOf(timeline), last };
    known.set(timeline, found);
  }
  return found;
}

export const launchRow = (scene: Scene, row: number): number => lookups(scene.timeline).launch[row];

/** A command whose launch is so long ago was there when the gap began. */
const QUEUED = 20_000;
const WHYS: Release["why"][] = ["launch", "order", "handoff"];

/** All that had to happen before this row went on; the last of it first. */
export function released(scene: Scene, row: number): Release[] {
  const { timeline, start, end, around } = scene;
  const { into, before, last } = lookups(timeline);
  const found: Release[] = [];
  const add = (one: number, why: Release["why"], time: number): void => {
    if (one !== NONE && one < row) found.push({ row: one, why, time });
  };
  if (before[row] !== NONE) add(before[row], "lane", end[before[row]]);
  else if (around > 0) found.push({ row: last[timeline.lane[row]], why: "lane", time: end[last[timeline.lane[row]]] - around });
  for (let at = into.first[row]; at < into.first[row + 1]; at++) {
    const source = timeline.links.source[into.link[at]];
    const kind = timeline.links.kind[into.link[at]];
    add(source, WHYS[kind], kind === LinkKind.LAUNCH ? start[source] : end[source]);
  }
  for (const lane of awaited(timeline, row)) {
    let one = row - 1;
    while (one >= 0 && timeline.lane[one] !== lane) one--;
    if (one >= 0) add(one, "sync", end[one]);
  }
  if (timeline.kind[row] === Kind.COLLECTIVE && timeline.meeting[row] >= 0) {
    for (let part = 0; part < timeline.rows; part++) {
      if (part !== row && timeline.meeting[part] === timeline.meeting[row]) found.push({ row: part, why: "meeting", time: start[part] });
    }
  }
  return found.sort((one, other) => other.time - one.time);
}

function awaited(timeline: Timeline, row: number): number[] {
  const awaits = timeline.awaits[row];
  if (awaits >= 0) return [awaits];
  if (awaits !== EVERY_LANE) return [];
  const rank = timeline.lanes[timeline.lane[row]].rank;
  return timeline.lanes.flatMap((lane, index) => (lane.rank === rank && lane.device !== null ? [index] : []));
}

/** What this row released by links of its own: its commands first. */
export function releases(scene: Scene, row: number): Release[] {
  const { timeline, start, end } = scene;
  const { out } = lookups(timeline);
  const found: Release[] = [];
  for (let at = out.first[row]; at < out.first[row + 1]; at++) {
    const target = timeline.links.target[out.link[at]];
    const kind = timeline.links.kind[out.link[at]];
    if (target > row) found.push({ row: target, why: WHYS[kind], time: kind === LinkKind.LAUNCH ? start[row] : end[row] });
  }
  return found;
}

/** `aten::mm at train.py:31`. */
export function named(scene: Scene, row: number): string {
  const { moment, base, timeline } = scene;
  const one = base[row];
  const call = moment.call[one] === NONE ? "" : moment.names[moment.call[one]];
  const place = moment.place[one] === NONE ? "" : moment.places[moment.place[one]].text;
  if (isCommand(timeline.kind[row])) return spanName(moment, one);
  const name = moment.names[moment.name[one]];
  const shown = call && timeline.kind[row] !== Kind.SYNC ? call : name.includes("): ") ? "Python" : name;
  return `${shown || "Python"}${place && leading(place) + place}`;
}

/** Why a span stands where it stands. */
export function story(scene: Scene, row: number): string {
  const { timeline, start, end } = scene;
  const kind = timeline.kind[row];
  const lasts = exactDuration(end[row] - start[row]);
  const before = released(scene, row);
  if (isCommand(kind)) return commandStory(scene, row, lasts, before);
  if (timeline.awaits[row] !== NONE) {
    const last = before.find((one) => one.why === "sync" || one.why === "order");
    const wait = last ? last.time - start[row] : 0;
    if (last && wait > 0) {
      return `Python waits here for ${duration(wait)} of ${lasts}: ${named(scene, row)} returns only when ${named(scene, last.row)} has ended.`;
    }
    return `${named(scene, row)} takes ${lasts}. It waits for the GPU, which had finished already.`;
  }
  const launched = releases(scene, row).filter((one) => one.why === "launch");
  if (launched.length) {
    const first = launched[0];
    const lead = start[first.row] - end[row];
    const many = launched.length > 1 ? ` and ${launched.length - 1} more` : "";
    const ahead = lead > 20_000 ? `Python is ${duration(lead)} ahead of the GPU here.` : "The GPU was waiting for this launch.";
    return `${named(scene, row)} launches ${named(scene, first.row)}${many}. ${ahead}`;
  }
  const handed = before.find((one) => one.why === "handoff");
  const after = handed ? ` It went on after ${named(scene, handed.row)}.` : "";
  return `${named(scene, row)} takes ${lasts} on the CPU.${after}`;
}

function commandStory(scene: Scene, row: number, lasts: string, before: Release[]): string {
  const { timeline, start, end } = scene;
  const launch = launchRow(scene, row);
  const by = launch === NONE ? "" : `, launched by ${named(scene, launch)}`;
  if (timeline.kind[row] === Kind.COLLECTIVE) {
    const wire = timeline.work[row];
    const waits = end[row] - start[row] - wire;
    const last = before.find((one) => one.why === "meeting");
    const late = last && last.time > start[row] ? ` Rank ${timeline.lanes[timeline.lane[last.row]].rank} arrives last.` : "";
    return `A collective${by}: ${duration(Math.max(0, waits))} of waiting for other ranks, then ${duration(Math.max(0, wire))} of transfer.${late}`;
  }
  const last = before[0];
  const verb = timeline.kind[row] === Kind.COPY ? "copies" : "runs";
  const why =
    !last ? "" :
    last.why === "lane" ? " It began when the one before it on its stream had ended." :
    last.why === "launch" ? " It began as soon as it was launched." :
    ` It began when ${named(scene, last.row)} had ended, on another stream.`;
  return `${named(scene, row)} ${verb} for ${lasts}${by}.${why}`;
}

/** Why the GPU is idle, and what ends that. `row` is the command that ends the gap. */
export function gapStory(scene: Scene, row: number, time: number, cause: string, culprit: number): string {
  const { moment, timeline } = scene;
  const launch = launchRow(scene, row);
  const place = culprit === NONE || moment.place[culprit] === NONE ? null : moment.places[moment.place[culprit]];
  const at = place ? leading(place.text) + place.text : "";
  const line = place?.source ? `: ${place.source}` : "";
  const last = released(scene, row)[0];
  const queued = launch !== NONE && scene.start[launch] + QUEUED < scene.start[row] - time;
  const ends =
    timeline.kind[row] === Kind.COLLECTIVE && last?.why === "meeting"
      ? `It ends when rank ${timeline.lanes[timeline.lane[last.row]].rank} arrives`
      : launch === NONE ? `It ends with ${named(scene, row)}`
      : queued ? `${named(scene, row)} was launched before, by ${named(scene, launch)}: the GPU takes this long from one kernel to the next` : `It ends when ${named(scene, launch)} launches ${named(scene, row)}`;
  return `The GPU is idle for ${exactDuration(time)}: ${cause}${at}${line}. ${ends}.`;
}
