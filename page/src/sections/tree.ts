// The run over wall-clock time: its loops, how busy the GPU was in each, and how its steps went.

import { element, section } from "../element";
import type { Header, Part, PlainRun } from "../run/run";
import { duration, plural, range, share } from "../words";
import type { Choice } from "../choice";

const NAMES: Record<string, string> = { imports: "imports", "first use of the GPU": "first use of the GPU", run: "the run" };
const WORTH_A_BOX = 0.004;

export function treeSection(header: Header, choice: Choice | null): HTMLElement | null {
  const { run } = header;
  if (!run) return null;
  const flame = element("div", { class: "flame", look: { "--rows": String(depthOf(run, run)) } });
  box(flame, run, run, 0, 0, choice);
  const made = section(
    "run",
    "The run",
    "Its loops over time. The bar at the foot of each box is the share of its time in which the GPU was at work.",
    flame,
    axis(run.time),
    list(run, choice),
  );
  for (const one of header.plain_runs) {
    const drawn = course(one, header.plain_runs.length > 1);
    if (drawn) made.append(drawn);
  }
  return made;
}

const shown = (part: Part, run: Part): Part[] => part.parts.filter((one) => one.time / run.time >= WORTH_A_BOX);
const depthOf = (part: Part, run: Part): number => 1 + Math.max(0, ...shown(part, run).map((one) => depthOf(one, run)));

function box(flame: HTMLElement, part: Part, run: Part, left: number, row: number, choice: Choice | null): void {
  const wide = part.time / run.time;
  const name = nameOf(part);
  const made = element("button", {
    type: "button",
    class: `box ${part.kind === "loop" ? "loop" : part.kind === "run" ? "root" : "line"}`,
    "data-says": `${name}: ${sentence(part)}`,
    look: { left: `${100 * left}%`, width: `${100 * wide}%`, top: `calc(${row} * var(--row))` },
    on: { click: () => follow(part, choice) },
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
    const began = part.kind === "run" || part.turns <= 1 ? one.began / run.time : at;
    const from = Math.min(Math.max(at, began), left + wide - one.time / run.time);
    box(flame, one, run, slack < 0 ? at : from, row + 1, choice);
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
  if (part.turns && part.kind === "loop") said.push(`${plural(part.turns, "turn")}${part.least ? " at least" : ""}`);
  if (part.turn) said.push(`${duration(part.turn[0])} a turn${part.turn[1] >= 0 ? ` (${range(part.turn[1], part.turn[2], part.turn[0])})` : ""}`);
  if (part.busy !== null) said.push(`GPU at work ${share(part.busy, part.time)}`);
  return said.join(", ");
}

function follow(part: Part, choice: Choice | null): void {
  const [, file, line] = /^(.*):(\d+)$/.exec(part.place) ?? [];
  if (!file || !choice) return;
  document.getElementById("turn")?.scrollIntoView({ behavior: "smooth", block: "start" });
  choice.line(file, Number(line));
}

function axis(length: number): HTMLElement {
  const made = element("div", { class: "axis", "aria-hidden": "true" });
  for (const part of [0, 0.25, 0.5, 0.75, 1]) made.append(element("span", { text: part ? duration(length * part) : "0" }));
  return made;
}

/** The same as text, for who cannot see or hover the boxes. */
function list(run: Part, choice: Choice | null): HTMLElement {
  const rows = (part: Part): HTMLElement[] =>
    shown(part, run).map((one) => {
      const [, file, line] = /^(.*):(\d+)$/.exec(one.place) ?? [];
      const name = file && choice
        ? element("button", { class: "place", type: "button", text: nameOf(one), on: { click: () => choice.line(file, Number(line)) } })
        : element("span", { text: nameOf(one) });
      const slow = one.slow && one.slow[3] > 0
        ? element("span", { class: "faint", text: ` · ${plural(one.slow[0], "turn")} took ${duration(one.slow[3])} longer${one.slow[4] ? `, at ${one.slow[4]}` : ""}` })
        : null;
      const inner = rows(one);
      return element("li", {}, name, element("span", { class: "faint", text: ` · ${sentence(one)}` }), slow, inner.length ? element("ul", {}, ...inner) : null);
    });
  return element("details", { class: "as-text" }, element("summary", { text: "The same as text" }), element("ul", {}, ...rows(run)));
}

/** How the steps went: a mark for every so many of them, the longest among them above it. */
function course(run: PlainRun, several: boolean): HTMLElement | null {
  const { each, step, longest } = run.course;
  if (step.length < 3) return null;
  const top = Math.max(...step) * 1.6;
  const stalls = longest.filter((time) => time > 1.5 * run.step).length;
  const drawn = element("div", { class: "course", role: "img", "aria-label": `Steps over the run: ${duration(run.step)} typically, the longest ${duration(Math.max(...longest))}` });
  step.forEach((time, index) => {
    const over = longest[index] > 1.5 * run.step;
    drawn.append(
      element("span", {
        class: over ? "stalled" : "",
        "data-says": `steps ${index * each + 1} to ${(index + 1) * each}: ${duration(time)} each${over ? `, the longest ${duration(longest[index])}` : ""}`,
        look: { height: `${Math.min(100, (100 * (over ? Math.min(longest[index], top) : time)) / top)}%` },
      }),
    );
  });
  const about = `${several ? `Rank ${run.rank}: ` : ""}${plural(run.steps, "step")} of the run, ${duration(run.step)} typically${stalls ? "; where the bar is hatched, one of them took far longer" : ""}.`;
  return element("figure", {}, drawn, element("figcaption", { class: "faint", text: about }));
}
