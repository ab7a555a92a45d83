// What a fix changes in a timeline, as keepbusy.explain.ledger applies it.

import { LinkKind, NONE, isCommand, numbered, ranksOf, taken, type Lane, type Numbers, type Timeline } from "./timeline";

const DROP_WAIT = 1;
const DROP = 2;
const CAPTURE = 4;
const LANE_SHIFT = 3;
export const GRAPH_SAVES = 870;
const FETCH = 1;
const WORKERS = 4;
const SIDE_LANES = ["", "fetch", "return", "wire", "workers"];

/** Bits and side stream of each row, the most work it keeps (-1: all), and the few rows that take another share of it. */
export interface Edit {
  flags: Numbers;
  limit: Numbers;
  scales: Map<number, number>;
}

/** Several edits made together. */
export function together(edits: Edit[], rows: number): Edit {
  if (edits.length === 1) return edits[0];
  const flags = new Int8Array(rows);
  const limit = new Float64Array(rows).fill(-1);
  const scales = new Map<number, number>();
  for (const edit of edits) {
    for (let row = 0; row < rows; row++) {
      const lane = Math.max(flags[row] >> LANE_SHIFT, edit.flags[row] >> LANE_SHIFT);
      flags[row] = ((flags[row] | edit.flags[row]) & 7) | (lane << LANE_SHIFT);
      if (edit.limit[row] >= 0) limit[row] = limit[row] < 0 ? edit.limit[row] : Math.min(limit[row], edit.limit[row]);
    }
    for (const [row, scale] of edit.scales) scales.set(row, (scales.get(row) ?? 1) * scale);
  }
  return { flags, limit, scales };
}

export interface Edited {
  timeline: Timeline;
  /** Of each row that stayed, which row of the timeline before it is. */
  row: Int32Array;
}

export function apply(timeline: Timeline, edit: Edit): Edited {
  const { rows } = timeline;
  const work = new Float64Array(rows);
  const lag = new Float64Array(timeline.lag);
  const awaits = timeline.awaits.slice();
  const side = new Int8Array(rows);
  const kept = new Uint8Array(rows);
  for (let row = 0; row < rows; row++) {
    const flags = edit.flags[row];
    const limit = edit.limit[row];
    side[row] = flags >> LANE_SHIFT;
    kept[row] = flags & DROP ? 0 : 1;
    work[row] = timeline.work[row];
    if (limit >= 0) work[row] = side[row] ? limit : Math.min(work[row], limit);
    const scale = edit.scales.get(row);
    if (scale !== undefined) work[row] = Math.trunc(work[row] * scale);
    if (flags & CAPTURE) lag[row] = Math.max(lag[row] - GRAPH_SAVES, Math.min(lag[row], 0));
    if (flags & DROP_WAIT) awaits[row] = NONE;
  }
  const events = linksWhere(timeline, (link) => {
    const { target, kind } = timeline.links;
    return !(edit.flags[target[link]] & DROP_WAIT && kind[link] === LinkKind.ORDER);
  });
  const waiting = { ...timeline, work, lag, awaits, links: events };
  return keep(onSideLanes(waiting, side), kept);
}

function linksWhere(timeline: Timeline, wanted: (link: number) => boolean): Timeline["links"] {
  const { source, target, kind, lag } = timeline.links;
  const chosen = numbered(source.length).filter(wanted);
  if (chosen.length === source.length) return timeline.links;
  return { source: new Int32Array(taken(source, chosen)), target: new Int32Array(taken(target, chosen)), kind: taken(kind, chosen), lag: taken(lag, chosen) };
}

/** Rows on lanes of their own: nothing on other streams waits for them, and they wait for no stream. */
function onSideLanes(timeline: Timeline, side: Int8Array): Timeline {
  if (!side.some((one) => one !== 0)) return timeline;
  const lanes: Lane[] = [...timeline.lanes];
  const lane = timeline.lane.slice();
  const lag = new Float64Array(timeline.lag);
  const rank = timeline.lanes.map((one) => one.rank);
  for (const one of [...new Set(side)].filter((some) => some > 0).sort()) {
    for (const ofRank of ranksOf(timeline)) {
      const rows = side.reduce<number[]>((some, its, row) => {
        if (its === one && rank[timeline.lane[row]] === ofRank) some.push(row);
        return some;
      }, []);
      if (!rows.length) continue;
      for (const row of rows) lane[row] = lanes.length;
      const device = one === WORKERS ? null : 0;
      lanes.push({ rank: ofRank, device, number: -one, name: `side stream: ${SIDE_LANES[one]}` });
    }
  }
  for (let row = 0; row < timeline.rows; row++) if (side[row]) lag[row] = 0;
  const { source, target, kind } = timeline.links;
  const uncut = linksWhere(timeline, (link) => {
    return kind[link] === LinkKind.LAUNCH || !(side[source[link]] || side[target[link]]);
  });
  const links = timeline.once ? withReaders(timeline, side, uncut) : uncut;
  return { ...timeline, lanes, lane, lag, links };
}

/** A script that is one iteration has no iteration before it in which to fetch: what follows a copy still waits for it. */
function withReaders(timeline: Timeline, side: Int8Array, links: Timeline["links"]): Timeline["links"] {
  const stays = new Uint8Array(timeline.rows);
  for (let row = 0; row < timeline.rows; row++) stays[row] = side[row] === 0 && isCommand(timeline.kind[row]) ? 1 : 0;
  const reader = nextKept(timeline.lane, stays, timeline.lanes.length);
  const copies = numbered(timeline.rows).filter((row) => side[row] === FETCH && reader[row] > row);
  const count = links.source.length + copies.length;
  const source = new Int32Array(count);
  const target = new Int32Array(count);
  const kind = new Float64Array(count).fill(LinkKind.ORDER);
  const lag = new Float64Array(count);
  source.set(links.source);
  target.set(links.target);
  kind.set(links.kind);
  lag.set(links.lag);
  source.set(copies, links.source.length);
  target.set(copies.map((row) => reader[row]), links.source.length);
  return { source, target, kind, lag };
}

/** Without the other rows. What they released is released by what stood before them on their lane. */
function keep(timeline: Timeline, kept: Uint8Array): Edited {
  const row = numbered(timeline.rows).filter((one) => kept[one] === 1);
  if (row.length === timeline.rows) return { timeline, row };
  const count = timeline.lanes.length;
  const place = new Int32Array(timeline.rows);
  row.forEach((one, index) => (place[one] = index));
  const heir = lastKeptBefore(timeline.lane, kept, count);
  const { source, target, kind } = timeline.links;
  const alive = linksWhere(timeline, (link) => {
    const launched = kind[link] === LinkKind.LAUNCH && !kept[source[link]];
    return kept[target[link]] === 1 && heir[source[link]] !== NONE && !launched;
  });
  const next = nextKept(timeline.lane, kept, count);
  const take = (column: Numbers): Float64Array => taken(column, row);
  const whole = (column: Numbers): Int32Array => new Int32Array(taken(column, row));
  return {
    row,
    timeline: {
      ...timeline,
      rows: row.length,
      lane: whole(timeline.lane),
      kind: whole(timeline.kind),
      start: take(timeline.start),
      end: take(timeline.end),
      work: take(timeline.work),
      lag: take(timeline.lag),
      awaits: whole(timeline.awaits),
      meeting: whole(timeline.meeting),
      links: {
        source: alive.source.map((one) => place[heir[one]]),
        target: alive.target.map((one) => place[one]),
        kind: alive.kind,
        lag: alive.lag,
      },
      marks: timeline.marks.map((one) => place[next[one]]),
    },
  };
}

/** Of each row: itself if it is kept, else the last kept row before it on its lane, else NONE. */
function lastKeptBefore(lane: Int32Array, kept: Uint8Array, lanes: number): Int32Array {
  const last = new Int32Array(lanes).fill(NONE);
  return lane.map((one, row) => (kept[row] ? (last[one] = row) : last[one]));
}

/** Of each row: itself if it is kept, else the next kept row on its lane; past the last one, the last kept one. */
function nextKept(lane: Int32Array, kept: Uint8Array, lanes: number): Int32Array {
  const next = new Int32Array(lanes).fill(NONE);
  const after = new Int32Array(lane.length);
  for (let row = lane.length - 1; row >= 0; row--) after[row] = kept[row] ? (next[lane[row]] = row) : next[lane[row]];
  const before = lastKeptBefore(lane, kept, lanes);
  return after.map((one, row) => (one === NONE ? before[row] : one));
}
