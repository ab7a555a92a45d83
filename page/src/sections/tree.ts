// The run over wall-clock time: its loops, and below them how busy the GPU was, how far Python was ahead, and the steps.

import { element, section } from "../element";
import { term } from "../glossary";
import type { Header, Part, PlainRun } from "../run/run";
import { duration, plural, range, share } from "../words";
import type { Choice } from "../choice";

const NAMES: Record<string, string> = { imports: "imports", "first use of the GPU": "first use of the GPU", run: "the run" };
const WORTH_A_BOX = 0.004;
const STALLED = 1.5;
const SHOWN_RANKS = 8;

/** `toLoop` shows the analysis of another loop, by its number. */
export function treeSection(header: Header, choice: Choice | null, toLoop: (index: number) => void): HTMLElement | null {
  const { run } = header;
  const courses = header.plain_runs.filter(({ course }) => course.step.length >= 3);
  if (!run && !courses.length) return null;
  const length = run?.time ?? Math.max(...courses.map(({ course }) => course.ended[course.ended.length - 1]));
  const about = run ? "Loops over time. The bar in each box is the share of its time in which the GPU is busy." : "";
  const made = section("run", "The run", about);
  if (run) {
    const flame = element("div", { class: "flame", look: { "--rows": String(depthOf(run, run)) } });
    box(flame, run, run, 0, 0, (part) => follow(header, part, choice, toLoop));
    made.append(flame);
  }
  made.append(...strips(header, courses, length, () => follow(header, null, choice, toLoop)), axis(length));
  if (run) made.append(list(run, choice));
  return made;
}

const shown = (part: Part, run: Part): Part[] => part.parts.filter((one) => one.time / run.time >= WORTH_A_BOX);
const depthOf = (part: Part, run: Part): number => 1 + Math.max(0, ...shown(part, run).map((one) => depthOf(one, run)));

function box(flame: HTMLElement, part: Part, run: Part, left: number, row: number, go: (part: Part) => void): void {
  const wide = part.time / run.time;
  const name = nameOf(part);
  const made = element("button", {
    type: "button",
    class: `box ${part.kind === "loop" ? "loop" : part.kind === "run" ? "root" : "line"}`,
    "data-says": `${name}: ${sentence(part)}`,
    look: { left: `${100 * left}%`, width: `${100 * wide}%`, top: `calc(${row} * var(--row))` },
    on: { click: () => go(part) },
  }, element("span", { class: "box-name", text: name }), wide > 0.12 ? element("span", { class: "box-time", text: duration(part.time) }) : null);
  if (part.busy !== null) {
    made.append(element("span", { class: "busy", "aria-hidden": "true" }, element("span", { look: { width: `${(100 * part.busy) / Math.max(1, part.time)}%` } })));
  }
  flame.append(made);
  let at = left;
  const inside = shown(part, run);
  const slack = 1 - inside.reduce((sum, one) => sum + one.time, 0) / Math.max(1, part.time);
  for (const one of inside) {
    // a loop that was entered once stands where it began; what comes again and again stands in its order
    const began = part.kind === "run" || part.iterations <= 1 ? one.began / run.time : at;
    const from = Math.min(Math.max(at, began), left + wide - one.time / run.time);
    box(flame, one, run, slack < 0 ? at : from, row + 1, go);
    at = (slack < 0 ? at : from) + one.time / run.time;
  }
}

function nameOf(part: Part): string {
  if (NAMES[part.kind]) return NAMES[part.kind];
  const place = part.place.replace(/^.*\//, "");
  return part.source ? `${place}  ${part.source.replace(/:$/, "")}` : place;
}

function sentence(part: Part): string {
  const said = [duration(part.time)];
  if (part.iterations && part.kind === "loop") said.push(`${plural(part.iterations, "iteration")}${part.least ? " at least" : ""}`);
  if (part.iteration) {
    const [mean, low, high] = part.iteration;
    const skewed = mean > 2 * high; // a few iterations that take very long are most of it
    const among = low >= 0 ? `${skewed ? " on average" : ""} (${skewed ? "mostly " : ""}${range(low, high, mean)})` : "";
    said.push(`${duration(mean)} per iteration${among}`);
  }
  if (part.busy !== null) said.push(`GPU busy ${share(part.busy, part.time)}`);
  return said.join(", ");
}

/** To the timeline: of this loop, if its iterations were recorded. */
function follow(header: Header, part: Part | null, choice: Choice | null, toLoop: (index: number) => void): void {
  const other = part ? header.analyses.findIndex((one) => one.place === part.place) : -1;
  if (other > 0) toLoop(other);
  document.getElementById("timeline")?.scrollIntoView({ behavior: "smooth", block: "start" });
  const [, file, line] = /^(.*):(\d+)$/.exec(part?.place ?? "") ?? [];
  if (file && choice) choice.line(file, Number(line));
}

function axis(length: number): HTMLElement {
  const made = element("div", { class: "axis", "aria-hidden": "true" });
  for (const part of [0, 0.25, 0.5, 0.75, 1]) made.append(element("span", { text: part ? duration(length * part) : "0" }));
  return made;
}

/** The same as text, for readers who cannot see or hover the boxes. */
function list(run: Part, choice: Choice | null): HTMLElement {
  const rows = (part: Part): HTMLElement[] =>
    shown(part, run).map((one) => {
      const [, file, line] = /^(.*):(\d+)$/.exec(one.place) ?? [];
      const name = file && choice
        ? element("button", { class: "place", type: "button", text: nameOf(one), on: { click: () => choice.line(file, Number(line)) } })
        : element("span", { text: nameOf(one) });
      const slow = one.slow && one.slow[3] > 0
        ? element("span", { class: "faint", text: ` · ${plural(one.slow[0], "iteration")} took ${duration(one.slow[3])} longer${one.slow[4] ? `, at ${one.slow[4]}` : ""}` })
        : null;
      const inner = rows(one);
      return element("li", {}, name, element("span", { class: "faint", text: ` · ${sentence(one)}` }), slow, inner.length ? element("ul", {}, ...inner) : null);
    });
  return element("details", { class: "as-text" }, element("summary", { text: "The same as text" }), element("ul", {}, ...rows(run)));
}

interface Stretch {
  from: number;
  to: number;
  /** Of the strip's height. */
  share: number;
  says: string;
  class?: string;
}

/** The GPU and the host over the same time, a strip each. */
function strips(header: Header, courses: PlainRun[], length: number, toTurns: () => void): HTMLElement[] {
  const made: HTMLElement[] = [];
  const each = length / Math.max(1, header.shares.length);
  if (header.shares.length) {
    made.push(strip(term("GPU busy"), length, "at-work", header.shares.map((percent, at) =>
      ({ from: at * each, to: (at + 1) * each, share: percent / 100, says: `The GPU is busy ${percent}% of this time.` }))));
  }
  courses.slice(0, SHOWN_RANKS).forEach((one, place) => {
    const of = courses.length > 1 ? ` of rank ${one.rank}` : "";
    const { step, longest, lead } = one.course;
    const steps = stretches(one);
    const most = Math.max(...lead);
    const usual = [...lead].sort((some, other) => some - other)[Math.floor(0.95 * (lead.length - 1))];
    if (most >= 0) {
      made.push(strip(element("span", {}, term("lead", "Python ahead of the GPU"), `${of}, up to ${duration(Math.max(0, most))}`), length, "lead-strip", steps.map((its, at) =>
        ({ ...its, share: Math.min(1, Math.max(0, lead[at]) / Math.max(1, 1.25 * usual)), says: `${its.says}: ${lead[at] > 0 ? `Python is ${duration(lead[at])} ahead of the GPU when a step ends` : "Python is not ahead, so the GPU waits for it"}.` }))));
    }
    if (place) return; // ranks go through their steps together
    const stalls = longest.some((time) => time > STALLED * one.step);
    const first = header.recorded[0];
    const about = [`${plural(one.steps, "step")} of ${duration(one.step)}`, stalls && "hatched: at least one far longer step", first !== undefined && "framed: recorded"];
    const drawn = strip(about.filter(Boolean).join("; "), length, "step-strip", steps.map((its, at) => {
      const over = longest[at] > STALLED * one.step;
      const time = over ? longest[at] : step[at];
      return { ...its, share: Math.min(1, time / (3 * one.step)), class: over ? "stalled" : "", says: `${its.says}: ${duration(step[at])} each${over ? `, the longest ${duration(longest[at])}` : ""}.` };
    }));
    made.push(drawn);
    if (first === undefined) return;
    // no plain step is where the recorder was
    const at = Math.min(Math.floor(first / one.course.each), steps.length - 1);
    const from = at ? steps[at - 1].to : steps[0].from;
    const says = `Steps ${first + 1} to ${header.recorded[header.recorded.length - 1]} were recorded; the timeline shows them.`;
    drawn.querySelector(".strip")!.append(element("button", { type: "button", class: "recorded", "aria-label": says, "data-says": says, look: { left: `${(100 * from) / length}%`, width: `${(100 * Math.max(0, steps[at].from - from)) / length}%` }, on: { click: toTurns } }));
  });
  return made;
}

const startOf = ({ each, step, ended }: PlainRun["course"]): number => Math.max(0, ended[0] - each * step[0]);

function stretches({ course }: PlainRun): Stretch[] {
  const { each, ended } = course;
  return ended.map((to, at) => {
    const named = each > 1 ? `Steps ${at * each + 1} to ${(at + 1) * each}` : `Step ${at + 1}`;
    return { from: Math.max(at ? ended[at - 1] : startOf(course), to - STALLED * each * Math.max(course.step[at], course.longest[at] / each)), to, share: 0, says: named };
  });
}

function strip(label: HTMLElement | string, length: number, kind: string, parts: Stretch[]): HTMLElement {
  const drawn = element("div", { class: `strip ${kind}`, role: "img", "aria-label": `${typeof label === "string" ? label : label.textContent} over the run` });
  for (const { from, to, share: high, says, class: more } of parts) {
    drawn.append(element("span", { class: more || undefined, "data-says": says, look: { left: `${(100 * from) / length}%`, width: `max(1px, ${(100 * (to - from)) / length}%)`, "--high": `${100 * high}%` } }));
  }
  return element("figure", {}, element("figcaption", { class: "faint" }, label), drawn);
}
