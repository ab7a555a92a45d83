// A run as the page knows it: what was explained, and the iterations with their columns.

import { read, type Block } from "./block";
import type { Edit } from "./edit";
import type { Lane, Numbers, Timeline } from "./timeline";

export interface Place {
  text: string;
  file: string;
  line: number;
  function: string;
  exact: boolean;
  source: string;
}
export type Prediction = [step: number, low: number, high: number];

export interface Fix {
  number: number;
  fix: string;
  /** All its places in short, and the first of them. */
  place: string;
  where: Place | null;
  causes: string[];
  prediction: string;
  predicted: Prediction;
  /** `per iteration`, or which iterations it makes shorter. */
  iterations: string;
  alone: number;
  needs: string[];
  instead: string[];
  says: string[];
  code: string;
  loop: string;
  replayed: boolean;
}

export interface Reason {
  cause: string;
  wait: number;
  count: number;
  sites: { where: Place; wait: number }[];
  what: string;
  advice: string;
  code: string;
  predicted: Prediction;
  same: string;
}

export interface Analysis {
  /** Empty for the steps; else the loop. */
  place: string;
  header: string;
  headline: string;
  /** The fix that the headline speaks of, or -1. */
  largest: number;
  statement: string;
  total: string;
  step: number;
  plain: boolean;
  noise: number;
  script: boolean;
  ledger: [place: string, time: number][];
  reasons: Reason[];
  plan: Fix[];
  late: { rank: number; late: number; cause: string; where: Place }[];
  notes: [label: string, sentence: string][];
  /** Data races, a sentence each. */
  races: string[];
}

export interface Part {
  kind: string;
  place: string;
  source: string;
  function: string;
  began: number;
  time: number;
  busy: number | null;
  iterations: number;
  least: boolean;
  iteration: [mean: number, low: number, high: number] | null;
  slow: [count: number, every: number, regular: boolean, longer: number, place: string] | null;
  parts: Part[];
}

export interface PlainRun {
  rank: number;
  steps: number;
  step: number;
  course: { each: number; step: number[]; longest: number[]; lead: number[]; ended: number[] };
}

/** A time before and after, and whether it is more than noise. */
export type Changed = [before: number, after: number, significant: boolean];

export interface Compared {
  step: Changed;
  ledger: [place: string, before: number, after: number, significant: boolean][];
  plan: { fix: string; where: string; made: boolean; saves: number }[];
  predicted: Prediction | null;
  run: [before: number, after: number, predicted: number] | null;
  notes: string[];
}

/** When most of a device's memory was allocated, and by which places. */
export interface Peak {
  rank: number;
  device: number;
  time: number;
  allocated: number;
  reserved: number;
  lines: [place: number, size: number][];
  rest: number;
}

interface Described {
  lanes: [number, number | null, number, string][];
  names: string[];
  places: Place[];
  pending: number | null;
  once: boolean;
  ratio: number;
  ranks: number[];
  /** Bytes a nanosecond that the link between host and device carries, where that is known. */
  link: number | null;
  peaks: Peak[];
  /** Two rows that nothing orders, and which of the analysis' races says that they must be. */
  missing: [first: number, second: number, race: number][];
}

export interface Header {
  version: string;
  source: string;
  looks: Record<string, { name: string; sentence: string }>;
  run: Part | null;
  /** Percent of each equal stretch of the run in which the GPU was busy. */
  shares: number[];
  /** Of a live recording: the number of the step that each mark ends. */
  recorded: number[];
  analyses: Analysis[];
  plain_runs: PlainRun[];
  sources: Record<string, [number, string][]>;
  /** On the page of two runs. */
  compared?: Compared;
  causes: string[];
  moments: Record<string, Described>;
  tables: Record<string, { rows: number; columns: [string, string, number, number][] }>;
}

/** Iterations of one loop, and their analysis. */
export interface Moment extends Omit<Described, "lanes"> {
  analysis: Analysis;
  causes: string[];
  timeline: Timeline;
  name: Int32Array;
  place: Int32Array;
  call: Int32Array;
  cause: Int32Array;
  rest: Int32Array;
  culprit: Int32Array;
  aside: Int32Array;
  size: Numbers;
  direction: Numbers;
  pinned: Numbers;
  meetings: Record<string, Numbers>;
  memory: Record<string, Numbers> | null;
  fixes: (Edit | null)[];
}

export interface Run {
  header: Header;
  /** Which of `analyses` can be drawn. */
  drawn: number[];
  moment(index: number): Promise<Moment>;
}

export async function load(text: string): Promise<Run> {
  const block = await read<Header>(text);
  const kept = new Map<number, Promise<Moment>>();
  return {
    header: block.header,
    drawn: Object.keys(block.header.moments).map(Number),
    moment(index) {
      if (!kept.has(index)) kept.set(index, momentOf(block, index));
      return kept.get(index)!;
    },
  };
}

const whole = (column: Numbers): Int32Array => (column instanceof Int32Array ? column : new Int32Array(column));
const wide = (column: Numbers): Float64Array => (column instanceof Float64Array ? column : new Float64Array(column));

async function momentOf(block: Block<Header>, index: number): Promise<Moment> {
  const { lanes, ...described } = block.header.moments[index];
  const analysis = block.header.analyses[index];
  const table = (name: string) => block.table(`${index}.${name}`);
  const [spans, links, meetings, marks] = await Promise.all(["spans", "links", "meetings", "marks"].map(table));
  const rows = spans.lane.length;
  const fixes = analysis.plan.map(async ({ number }): Promise<Edit | null> => {
    if (!block.has(`${index}.fix${number}`)) return null;
    const [edit, scale] = await Promise.all([table(`fix${number}`), table(`fix${number}.scale`)]);
    return { flags: edit.flags, limit: edit.limit, scales: scalesOf(scale) };
  });
  const timeline: Timeline = {
    rows,
    lanes: lanes.map(([rank, device, number, name]): Lane => ({ rank, device, number, name })),
    lane: whole(spans.lane),
    kind: spans.kind,
    start: wide(spans.start),
    end: wide(spans.end),
    work: spans.work,
    lag: spans.lag,
    awaits: whole(spans.awaits),
    meeting: whole(spans.meeting),
    links: { source: whole(links.source), target: whole(links.target), kind: links.kind, lag: links.lag },
    marks: whole(marks.marks),
    pending: described.pending,
    once: described.once,
  };
  return {
    ...described,
    analysis,
    causes: block.header.causes,
    timeline,
    name: whole(spans.name),
    place: whole(spans.place),
    call: whole(spans.call),
    cause: whole(spans.cause),
    rest: whole(spans.rest),
    culprit: whole(spans.culprit),
    aside: whole(spans.aside),
    size: spans.size,
    direction: spans.direction,
    pinned: spans.pinned,
    meetings,
    memory: block.has(`${index}.memory`) ? await table("memory") : null,
    fixes: await Promise.all(fixes),
  };
}

function scalesOf(table: Record<string, Numbers>): Map<number, number> {
  const bits = new DataView(new ArrayBuffer(8));
  const scales = new Map<number, number>();
  for (let index = 0; index < table.row.length; index++) {
    bits.setUint32(0, table.low[index], true);
    bits.setUint32(4, table.high[index], true);
    scales.set(table.row[index], bits.getFloat64(0, true));
  }
  return scales;
}
