// The program beside its timeline: a column with the time per iteration that the GPU is idle because of each line.

import type { Choice } from "../choice";
import { element } from "../element";
import type { Header } from "../run/run";
import { NONE } from "../run/timeline";
import { HATCHES } from "../timeline/paint";
import { launchRow } from "../timeline/releases";
import { causeOf, isGap } from "../timeline/scene";
import { duration, share } from "../words";

interface Blamed {
  wait: number;
  /** Whether the recording knows the line itself, or only the function around it. */
  exact: boolean;
  causes: Map<string, number>;
}

export class SourcePanel {
  readonly element = element("aside", { class: "source", "aria-label": "Source" });
  private readonly waits = new Map<string, Blamed>();
  private readonly files: string[];
  private shown = "";

  constructor(private readonly header: Header, private readonly choice: Choice) {
    this.blame();
    const spoken = new Set(choice.moment.places.map((place) => place.file).filter(Boolean));
    this.files = [...spoken].sort((one, other) => this.waitOf(other) - this.waitOf(one) || one.localeCompare(other));
    choice.onLine((file, line) => this.show(file, line));
    if (this.files.length) this.open(this.files[0]);
    else this.element.append(element("p", { class: "faint", text: "This recording has no stacks, so no lines are known." }));
  }

  /** Whether there is more to show than the few lines that the recording names. */
  get hasText(): boolean {
    return this.files.length > 0 && this.header.sources[this.files[0]] !== undefined;
  }

  /** Once it is on the page: the line for which the GPU is idle longest. */
  showWorst(): void {
    const [worst] = [...this.waits.entries()].sort((one, other) => other[1].wait - one[1].wait);
    if (!worst) return;
    const at = worst[0].lastIndexOf(":");
    this.show(worst[0].slice(0, at), Number(worst[0].slice(at + 1)));
  }

  /** For each line, the idle time it causes per iteration and rank. */
  private blame(): void {
    const { moment, now } = this.choice;
    const iterations = Math.max(1, now.iterations.length) * moment.ranks.length;
    for (const track of now.tracks) {
      if (track.kind !== "gpu") continue;
      const { start, end, tone, what } = track.parts;
      for (let part = 0; part < track.count; part++) {
        if (causeOf(tone[part]) === NONE) continue;
        const launch = launchRow(now, what[part]);
        const culprit = isGap(tone[part]) ? moment.culprit[now.base[what[part]]] : launch === NONE ? NONE : now.base[launch];
        const place = culprit === NONE ? NONE : moment.place[culprit];
        if (place === NONE) continue;
        const { file, line } = moment.places[place];
        const known = this.waits.get(`${file}:${line}`) ?? { wait: 0, exact: true, causes: new Map() };
        known.exact &&= moment.places[place].exact;
        // what is drawn beyond the last iteration is what the first one begins with
        const until = now.around > 0 ? Math.min(end[part], now.around) : end[part];
        const wait = Math.max(0, until - Math.max(0, start[part])) / iterations;
        const cause = moment.causes[causeOf(tone[part])] ?? "unknown";
        known.wait += wait;
        known.causes.set(cause, (known.causes.get(cause) ?? 0) + wait);
        this.waits.set(`${file}:${line}`, known);
      }
    }
  }

  private waitOf(file: string): number {
    let sum = 0;
    for (const [place, { wait }] of this.waits) if (place.slice(0, place.lastIndexOf(":")) === file) sum += wait;
    return sum;
  }

  show(file: string, line: number): void {
    if (!this.files.includes(file)) return;
    if (this.shown !== file) this.open(file);
    let chosen: HTMLElement | null = null;
    for (const row of this.element.querySelectorAll<HTMLElement>("li[data-line]")) {
      row.classList.toggle("chosen", Number(row.dataset.line) === line);
      if (Number(row.dataset.line) === line) chosen = row;
    }
    const list = this.element.querySelector<HTMLElement>("ol");
    if (chosen && list) list.scrollTop = chosen.offsetTop - list.offsetTop - list.clientHeight / 3;
  }

  private open(file: string): void {
    this.shown = file;
    const known = this.header.sources[file];
    const lines: [number, string][] = known ?? this.linesOf(file);
    const longest = Math.max(1, ...[...this.waits.values()].map(({ wait }) => wait));
    const list = element("ol", { class: "code", tabindex: "0", "aria-label": file });
    const spoken = new Set(this.choice.moment.places.filter((place) => place.file === file).map((place) => place.line));
    let before = 0;
    for (const [number, text] of lines) {
      if (before && number > before + 1) list.append(element("li", { class: "cut", text: "⋯" }));
      before = number;
      list.append(this.line(file, number, text, longest, spoken.has(number)));
    }
    const choose = element("select", { "aria-label": "File", on: { change: () => this.show(choose.value, 0) } },
      ...this.files.map((one) => element("option", { value: one, text: one, selected: one === file })),
    );
    const missing = known ? null : element("p", { class: "faint", text: "The source was not found when this page was written. Only lines that the recording names are shown." });
    const vague = [...this.waits].some(([place, { exact }]) => !exact && place.slice(0, place.lastIndexOf(":")) === file);
    const note = vague ? element("p", { class: "faint" }, element("span", { class: "vague", text: "Slanted" }), " times belong to the whole function: the recording does not know the line.") : null;
    this.element.replaceChildren(element("div", { class: "source-head" }, element("span", { class: "faint", text: "GPU idle", "data-says": "The time per iteration that the GPU is idle because of each line.", tabindex: "0" }), choose), list, ...[missing, note].filter((one) => one !== null));
  }

  private linesOf(file: string): [number, string][] {
    const lines = new Map<number, string>();
    for (const place of this.choice.moment.places) if (place.file === file && place.line) lines.set(place.line, place.source || (place.function ? `in ${place.function}` : ""));
    const parts = this.header.run ? [this.header.run] : [];
    for (let part = parts.pop(); part; part = parts.pop()) {
      parts.push(...part.parts);
      const [, its, line] = /^(.*):(\d+)$/.exec(part.place) ?? [];
      if (its === file && part.source) lines.set(Number(line), part.source);
    }
    return [...lines].sort((one, other) => one[0] - other[0]);
  }

  private line(file: string, number: number, text: string, longest: number, spoken: boolean): HTMLElement {
    const blamed = this.waits.get(`${file}:${number}`);
    const [cause] = [...(blamed?.causes ?? [])].sort((one, other) => other[1] - one[1])[0] ?? [""];
    const { step } = this.choice.moment.analysis;
    const margin = element("span", { class: "margin", role: blamed ? "note" : undefined });
    if (blamed && blamed.wait > 0.0005 * step) {
      margin.append(
        element("span", { class: blamed.exact ? "wait-time" : "wait-time vague", text: duration(blamed.wait) }),
        element("span", { class: `wait ${HATCHES[cause] ?? ""}`, "aria-hidden": "true", look: { "--fill": `var(--${cause})`, width: `${Math.max(4, (100 * blamed.wait) / longest)}%` } }),
      );
      margin.dataset.says = `The GPU is idle ${duration(blamed.wait)} per iteration (${share(blamed.wait, step)}) because of ${blamed.exact ? "this line" : "this function"}: ${[...blamed.causes].map(([one, wait]) => `${this.header.looks[one]?.name ?? one} ${duration(wait)}`).join(", ")}.`;
    }
    const code = element("span", { class: "text", text: text || " " });
    const numbered = element("span", { class: "line-number", text: String(number) });
    return element("li", { "data-line": String(number), class: spoken ? "spoken" : "" },
      margin,
      spoken ? element("button", { type: "button", "aria-label": `Show line ${number} in the timeline`, on: { click: () => this.choice.line(file, number) } }, numbered) : numbered,
      code,
    );
  }
}
