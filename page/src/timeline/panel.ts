// Iterations on a canvas: the recorded run above, with fixes below. A pointer, a wheel, fingers and keys move through them.

import type { Choice } from "../choice";
import { element, section } from "../element";
import { GLOSSARY, KINDS, term } from "../glossary";
import type { Header, Moment, Place } from "../run/run";
import { NONE, isCommand } from "../run/timeline";
import { AT_WORK, swatch } from "../sections/ledger";
import { bytes, duration, exactDuration, plural } from "../words";
import { Drawing, type Arrow, type Spot } from "./drawing";
import { gapStory, named, released, releases, story } from "./releases";
import { GPU, causeOf, isGap as hasNothingToDo, type Scene } from "./scene";
import type { Track } from "./track";
import { Viewport } from "./viewport";

const WHEEL = 0.0016;
const MOST_ARROWS = 12;

export class TimelinePanel {
  readonly element: HTMLElement;
  private readonly viewport: Viewport;
  private readonly above: Drawing;
  private readonly below: Drawing;
  private readonly belowBox: HTMLElement;
  private readonly belowName = element("p", { class: "view-name" });
  /** The other run, where two are compared. */
  private readonly beside: Drawing | null;
  private readonly selected = element("div", { class: "selected", role: "status", "aria-live": "polite" });
  private readonly overview = element("canvas", { class: "overview", "aria-hidden": "true" });
  private readonly counted = element("span", { class: "faint" });
  private asRecorded = false;
  private pointers = new Map<number, { x: number; y: number }>();

  constructor(private readonly header: Header, readonly choice: Choice, source: HTMLElement, hasSource: boolean, other: { name: string; scene: Scene } | null) {
    const now = choice.now;
    this.viewport = new Viewport(now.length);
    this.above = new Drawing(now, this.viewport, "The timeline: threads above, the GPU below. The text under it describes the selection.");
    this.below = new Drawing(now, this.viewport, "The same timeline with the fixes that are switched on.");
    this.beside = other && new Drawing(other.scene, this.viewport, "The timeline of the other run.");
    for (const drawing of this.drawings) {
      drawing.causeName = (cause) => this.causeName(cause);
      this.listen(drawing);
    }
    const aboveBox = element("div", { class: "view" }, this.above.canvas);
    this.belowBox = element("div", { class: "view", hidden: true }, this.belowName, this.below.canvas);
    const besideBox = this.beside && element("div", { class: "view" }, element("p", { class: "view-name", text: `${other!.name}: ${duration(other!.scene.step)} per iteration` }), this.beside.canvas);
    const drawings = element("div", { class: "drawings" }, this.overview, aboveBox, this.belowBox, besideBox, this.selected, this.legend());
    this.element = section("timeline", "Timeline", "", this.toolbar(), element("div", { class: hasSource ? "split" : "split narrow-source" }, drawings, source));
    this.element.querySelector("header")!.append(
      element("p", { class: "lead" }, "Python launches, the GPU executes. Each ", term("gap"), " is hatched in the colour of its ", term("cause"), ". Click anything to see what it waited for."),
    );
    choice.onFixes((view) => this.showFixed(view));
    choice.onLine((file, line) => this.showLine(file, line));
    choice.onCause((cause) => this.showCause(cause));
    this.viewport.onChange(() => {
      this.align();
      this.drawOverview();
    });
    new ResizeObserver(() => this.resize()).observe(drawings);
    this.describe(null, this.above);
  }

  /**
   * The iteration whose time is closest to the plain step; two if there are several streams, because a batch that is
   * copied in one is used in the next. If Python runs ahead, its iterations are shorter than those of the GPU.
   */
  oneIteration(): void {
    const { iterations, length, around, tracks } = this.above.scene;
    if (iterations.length < 2) return this.viewport.all();
    const streams = tracks.filter((track) => track.kind === "stream");
    const count = streams.length > new Set(streams.map((track) => track.rank)).size ? 2 : 1;
    const starts = [...iterations.map(({ start }) => start), around > 0 ? iterations[0].start + around : length];
    const wanted = count * this.choice.moment.analysis.step;
    const lasts = starts.slice(count).map((end, index) => end - starts[index]);
    const off = lasts.map((time, index) => Math.abs(time - wanted) + (index ? index : 3) * 0.02 * wanted);
    const best = off.indexOf(Math.min(...off));
    const long = Math.max(lasts[best], wanted);
    this.viewport.show(starts[best] - 0.04 * long, starts[best] + 1.06 * long);
  }

  private get drawings(): Drawing[] {
    return [this.above, this.below, this.beside].filter((one) => one !== null);
  }

  /** The iteration at the left stands above the same iteration of the other drawings, however long those before it were. */
  private align(): void {
    const { iterations } = this.above.scene;
    const at = Math.max(0, iterations.findLastIndex((iteration) => iteration.start <= this.viewport.from + 0.1 * this.viewport.span));
    for (const drawing of this.drawings) {
      const its = drawing.scene.iterations;
      drawing.shift = its.length && iterations.length ? its[Math.min(at, its.length - 1)].start - iterations[at].start : 0;
    }
  }

  resize(): void {
    for (const drawing of this.drawings) if (drawing !== this.below || !this.belowBox.hidden) drawing.resize();
    this.drawOverview();
  }

  recolour(): void {
    for (const drawing of this.drawings) drawing.recolour();
    this.drawOverview();
  }

  private causeName(cause: number): string {
    const name = this.choice.moment.causes[cause];
    if (!name) return "recording";
    return name === "unknown" ? "unknown" : this.header.looks[name].name;
  }

  private causeSentence(cause: number): string {
    const name = this.choice.moment.causes[cause];
    if (!name) return "only because of the recorder";
    return name === "unknown" ? "not explained by this recording" : this.header.looks[name].name;
  }

  private toolbar(): HTMLElement {
    const button = (text: string, label: string, click: () => void) => element("button", { type: "button", text, "aria-label": label, "data-says": label, on: { click } });
    const search = element("input", {
      type: "search",
      placeholder: "Search kernels, calls, lines",
      "aria-label": "Search kernels, calls and lines",
      id: "search",
      on: {
        input: () => this.search(search.value),
        keydown: (event: KeyboardEvent) => {
          if (event.key === "Enter") this.nextFound(event.shiftKey ? -1 : 1);
          if (event.key === "Escape") {
            search.value = "";
            this.search("");
          }
        },
      },
    });
    const views = element("select", { "aria-label": "With or without the recorder", on: { change: () => this.showRecorded(views.value === "recorded") } },
      element("option", { value: "plain", text: "without the recorder" }),
      element("option", { value: "recorded", text: "as recorded" }),
    );
    return element("div", { class: "toolbar" },
      element("span", { class: "group" },
        button("−", "Zoom out (key −)", () => this.viewport.zoom(1.6)),
        button("+", "Zoom in (key +)", () => this.viewport.zoom(1 / 1.6)),
        button("Iteration", "One or two iterations (key 1)", () => this.oneIteration()),
        button("All", "Everything (key 0)", () => this.viewport.all()),
      ),
      element("span", { class: "group" },
        button("‹ gap", "The previous long gap (key p)", () => this.nextGap(-1)),
        button("gap ›", "The next long gap (key n)", () => this.nextGap(1)),
      ),
      this.choice.moment.analysis.plain ? views : null,
      element("span", { class: "grow" }),
      this.counted,
      search,
    );
  }

  private legend(): HTMLElement {
    const { analysis, causes } = this.choice.moment;
    const shown = new Set<string>([...analysis.ledger.map(([place]) => place)]);
    for (const track of this.above.scene.tracks) {
      if (track.kind === "gpu") for (const tone of new Set(track.parts.tone)) if (tone >= GPU.GAP) shown.add(causes[causeOf(tone)] ?? "recorder");
    }
    const looks = this.header.looks;
    const item = (place: string, name: string, says: string) => element("li", { "data-says": says, tabindex: "0" }, swatch(place), name);
    const hostKinds = new Set(this.above.scene.tracks.filter((track) => track.kind === "host").flatMap((track) => [...new Set(track.parts.tone)]));
    const named = (place: string) => item(place, looks[place].name, looks[place].sentence);
    const groups: [string, HTMLElement[]][] = [
      ["CPU", ["work", "launch", "sync", "allocate"].flatMap((place, kind) => (hostKinds.has(kind) ? [item(place, ...KINDS[kind])] : []))],
      ["GPU busy", AT_WORK.filter((place) => shown.has(place)).map(named)],
      ["GPU idle", causes.filter((place) => shown.has(place)).map(named)],
    ];
    return element("div", { class: "legend", role: "group", "aria-label": "Colours" }, ...groups.filter(([, items]) => items.length).map(([name, items]) =>
      element("ul", { "aria-label": name }, element("li", { class: "legend-name", text: name }), ...items)));
  }

  private showFixed(view: Scene): void {
    this.belowBox.hidden = !view.fixed.length;
    if (this.belowBox.hidden) return this.resize();
    const { analysis } = this.choice.moment;
    this.belowName.textContent = `With ${view.fixed.map((fix) => `${fix + 1} ${analysis.plan[fix].fix}`).join(", ")}: ${duration(view.step)} instead of ${duration(analysis.step)} per iteration`;
    this.below.marked = { ...this.above.marked, spot: null, arrows: [] };
    this.below.change(view);
    this.align();
  }

  private showRecorded(recorded: boolean): void {
    this.asRecorded = recorded;
    const scene = recorded ? this.choice.recorded : this.choice.now;
    this.viewport.length = scene.length;
    this.select(null, this.above);
    this.above.change(scene);
    this.oneIteration();
  }

  /** The line's band stands out, and what is longest there comes into view. */
  private showLine(file: string, line: number): void {
    for (const drawing of this.drawings) {
      const place = drawing.scene.moment.places.findIndex((one) => one.file === file && one.line === line);
      drawing.marked = { ...drawing.marked, place, found: null };
      drawing.later();
    }
    const { place } = this.above.marked;
    if (place === NONE) return;
    let best: { start: number; end: number } | null = null;
    for (const track of this.above.scene.tracks) {
      if (track.kind !== "lines") continue;
      const { start, end, what } = track.parts;
      for (let part = 0; part < track.count; part++) {
        if (what[part] === place && (!best || end[part] - start[part] > best.end - best.start)) best = { start: start[part], end: end[part] };
      }
    }
    if (best && (best.start < this.viewport.from || best.end > this.viewport.to)) this.viewport.lookAt(best.start, best.end);
  }

  private showCause(cause: string): void {
    const wanted = this.choice.moment.causes.indexOf(cause);
    document.getElementById("timeline")?.scrollIntoView({ behavior: "smooth", block: "start" });
    const best = this.gaps((tone) => causeOf(tone) === wanted).sort((one, other) => lengthOf(other) - lengthOf(one))[0];
    if (best) this.goTo(best);
  }

  private gaps(wanted: (tone: number) => boolean): Spot[] {
    return this.above.scene.tracks
      .filter((track) => track.kind === "gpu")
      .flatMap((track) => Array.from(track.parts.tone.keys()).filter((part) => track.parts.tone[part] >= GPU.GAP && wanted(track.parts.tone[part])).map((part) => ({ track, part })));
  }

  private goTo(spot: Spot): void {
    this.viewport.lookAt(spot.track.parts.start[spot.part], spot.track.parts.end[spot.part]);
    this.select(spot, this.above);
  }

  /** The next gap of some length: the short ones between kernels are many. */
  private nextGap(direction: number): void {
    const gaps = this.gaps(() => true);
    const longest = Math.max(0, ...gaps.map(lengthOf));
    const long = gaps.filter((gap) => lengthOf(gap) > 0.02 * longest).sort((one, other) => startOf(one) - startOf(other));
    if (!long.length) return;
    const { spot } = this.above.marked;
    const here = spot ? startOf(spot) : direction > 0 ? this.viewport.from : this.viewport.to;
    const next = direction > 0 ? long.find((gap) => startOf(gap) > here) : long.findLast((gap) => startOf(gap) < here);
    this.goTo(next ?? (direction > 0 ? long[0] : long[long.length - 1]));
  }

  private found: number[] = [];
  private search(text: string): void {
    const { moment, now } = this.choice;
    const wanted = text.trim().toLowerCase();
    const rows = rowsNamed(moment, wanted);
    this.found = rows.filter((row) => now.here[row] !== NONE);
    this.counted.textContent = wanted ? plural(rows.length, "span") : "";
    for (const drawing of this.drawings) {
      const its = drawing === this.beside ? rowsNamed(drawing.scene.moment, wanted) : rows;
      drawing.marked = { ...drawing.marked, found: wanted ? new Set(its) : null };
      drawing.later();
    }
  }

  private nextFound(direction: number): void {
    const { scene } = this.above;
    if (!this.found.length) return;
    const selected = this.above.marked.spot;
    const current = selected && selected.track.kind !== "lines" ? this.found.indexOf(scene.base[selected.track.parts.what[selected.part]]) : -1;
    const next = this.found[(current + direction + this.found.length) % this.found.length];
    this.goToRow(scene.here[next]);
  }

  private goToRow(row: number, drawing = this.above): void {
    const spot = drawing.spotOf(row);
    if (!spot) return;
    const { start, end } = drawing.scene;
    this.bringIntoView(drawing, start[row], end[row]);
    this.select(spot, drawing);
  }

  private bringIntoView({ shift }: Drawing, from: number, to: number): void {
    if (from - shift < this.viewport.from || to - shift > this.viewport.to) this.viewport.lookAt(from - shift, to - shift);
  }

  private select(spot: Spot | null, drawing: Drawing): void {
    for (const other of this.drawings) other.marked = { ...other.marked, spot: null, arrows: [] };
    const row = spot && spot.track.kind !== "lines" ? spot.track.parts.what[spot.part] : NONE;
    const isGap = spot?.track.kind === "gpu" && hasNothingToDo(spot.track.parts.tone[spot.part]);
    drawing.marked = { ...drawing.marked, spot, arrows: row === NONE || !spot ? [] : this.arrows(drawing.scene, row, Boolean(isGap), shiftOf(drawing.scene, spot)) };
    for (const other of this.drawings) other.later();
    this.describe(spot, drawing);
    this.showPlaceOf(spot, drawing.scene);
  }

  private showPlaceOf(spot: Spot | null, scene: Scene): void {
    if (!spot) return;
    const { moment } = scene;
    const what = spot.track.parts.what[spot.part];
    const base = scene.base[what];
    const isGap = spot.track.kind === "gpu" && hasNothingToDo(spot.track.parts.tone[spot.part]);
    const launch = spot.track.kind === "lines" ? NONE : released(scene, what).find((one) => one.why === "launch")?.row ?? NONE;
    const culprit = isGap ? moment.culprit[base] : NONE;
    const row = culprit !== NONE ? culprit : launch !== NONE ? scene.base[launch] : base;
    const place = spot.track.kind === "lines" ? what : moment.place[row];
    if (place !== NONE) this.onPlace(moment.places[place]);
  }

  /** Set by the page: the source shows the place. */
  onPlace: (place: Place) => void = () => undefined;

  private arrows(scene: Scene, row: number, isGap: boolean, shift: number): Arrow[] {
    const { start, end, timeline } = scene;
    const into = released(scene, row).slice(0, isGap ? 2 : MOST_ARROWS).filter((one) => one.why !== "lane");
    const toTime = (row: number) => shift + (isCommand(timeline.kind[row]) || timeline.awaits[row] === NONE ? start[row] : end[row]);
    const arrows: Arrow[] = into.map((one) => ({ from: one.row, fromTime: one.time + shift, to: row, toTime: toTime(row), into: true }));
    if (isGap) return arrows;
    for (const one of releases(scene, row).slice(0, MOST_ARROWS)) {
      arrows.push({ from: row, fromTime: one.time + shift, to: one.row, toTime: toTime(one.row), into: false });
    }
    return arrows;
  }

  private describe(spot: Spot | null, drawing: Drawing): void {
    if (!spot) {
      const { moment, missing } = drawing.scene;
      const races = missing.length ? moment.missing.map(([, , race]) => element("p", { class: "race", text: `✗ ${moment.analysis.races[race]}` })) : [];
      this.selected.replaceChildren(...races, element("p", { class: "faint", text: "Click a span or a gap. Keys: n for the next long gap, arrows to move, + and − to zoom. Click the timeline to zoom with the wheel." }));
      return;
    }
    const { scene } = drawing;
    const { moment } = scene;
    const { start, end, tone, what } = spot.track.parts;
    const from = start[spot.part];
    const to = end[spot.part];
    if (spot.track.kind === "lines") {
      const place = moment.places[what[spot.part]];
      this.selected.replaceChildren(
        element("p", { text: `${place.text} took ${exactDuration(to - from)} of this thread${place.function ? `, in ${place.function}` : ""}.` }),
        ...(place.source ? [element("pre", {}, element("code", { text: place.source }))] : []),
      );
      return;
    }
    const row = what[spot.part];
    const isGpu = spot.track.kind === "gpu";
    const isGap = isGpu && hasNothingToDo(tone[spot.part]);
    const said = isGap
      ? gapStory(scene, row, to - from, this.causeSentence(causeOf(tone[spot.part])), moment.culprit[scene.base[row]])
      : isGpu && tone[spot.part] >= GPU.ASIDE
        ? `The GPU computes nothing for ${exactDuration(to - from)}: ${drawing.label(spot.track, spot.part).replace(" · ", " at ")}. This could overlap with kernels. ${story(scene, row)}`
      : isGpu
        ? `The GPU is ${["computing", "copying", "exchanging data with other ranks"][tone[spot.part]]} for ${exactDuration(to - from)}, beginning with ${named(scene, row)}.`
        : story(scene, row);
    this.selected.replaceChildren(element("p", { class: "said", text: said }), this.facts(scene, row, isGap || isGpu ? null : row, from, to, drawing));
  }

  /** One sentence on what the pointer is at: what it is, how long it lasts, and what its colour means. */
  private says(drawing: Drawing, { track, part }: Spot): string {
    const { tone, start, end } = track.parts;
    const what = `${drawing.label(track, part)} · ${exactDuration(end[part] - start[part])}`;
    if (track.kind === "lines") return `${what}. ${GLOSSARY[track.label] ?? ""}`;
    if (track.kind !== "gpu") return `${what}. ${KINDS[tone[part]]?.[1] ?? ""}`;
    const cause = causeOf(tone[part]);
    const name = cause === NONE ? AT_WORK[tone[part]] : this.choice.moment.causes[cause];
    return `${what}. ${name ? this.header.looks[name].sentence : "Idle only because of the recorder"}.`;
  }

  private facts(scene: Scene, row: number, whole: number | null, from: number, to: number, drawing: Drawing): HTMLElement {
    const { moment } = scene;
    const base = scene.base[row];
    const facts = element("dl", { class: "facts" });
    const fact = (name: string, value: string | HTMLElement) => facts.append(element("dt", { text: name }), element("dd", {}, value));
    fact("from", exactDuration(from));
    fact("to", exactDuration(to));
    if (whole !== null) {
      fact("name", moment.names[moment.name[base]]);
      const size = moment.size[base];
      if (size > 0) fact("bytes", `${bytes(size)}${to > from ? `, ${(size / (to - from)).toFixed(1)} GB/s` : ""}`);
      if (moment.aside[base] !== NONE) fact("could", `overlap with kernels: ${this.header.looks[moment.causes[moment.aside[base]]].name}`);
    }
    const links = [
      ...released(scene, row).filter((one) => one.why !== "lane").slice(0, 3).map((one) => ["waited for", one.row] as const),
      ...(whole === null ? [] : releases(scene, row).slice(0, 3).map((one) => ["then", one.row] as const)),
    ];
    for (const [name, other] of links) {
      const { rank } = scene.timeline.lanes[scene.timeline.lane[other]];
      const its = rank === scene.timeline.lanes[scene.timeline.lane[row]].rank ? "" : ` of rank ${rank}`;
      fact(name, element("button", { type: "button", class: "place", text: `${named(scene, other)}${its}`, on: { click: () => this.goToRow(other, drawing) } }));
    }
    return facts;
  }

  private listen(drawing: Drawing): void {
    const { canvas } = drawing;
    let moved = 0;
    let pinch = 0;
    const at = (event: MouseEvent): { x: number; y: number } => {
      const box = canvas.getBoundingClientRect();
      return { x: event.clientX - box.left, y: event.clientY - box.top };
    };
    canvas.addEventListener("pointerdown", (event) => {
      this.pointers.set(event.pointerId, at(event));
      moved = 0;
      pinch = 0;
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      const here = at(event);
      const before = this.pointers.get(event.pointerId);
      if (!before) {
        const spot = drawing.spot(here.x, here.y);
        canvas.classList.toggle("over", Boolean(spot));
        if (spot?.track !== drawing.hover?.track || spot?.part !== drawing.hover?.part) {
          drawing.hover = spot;
          drawing.later();
        }
        canvas.dataset.says = spot ? this.says(drawing, spot) : laneSays(drawing.trackAt(here.y));
        return;
      }
      this.pointers.set(event.pointerId, here);
      if (this.pointers.size === 2) {
        const [one, other] = [...this.pointers.values()];
        const apart = Math.hypot(one.x - other.x, one.y - other.y);
        if (pinch) this.viewport.zoom(pinch / Math.max(apart, 1), drawing.time((one.x + other.x) / 2) - drawing.shift);
        pinch = apart;
        moved = 100;
        return;
      }
      moved += Math.abs(here.x - before.x);
      if (moved > 3) this.viewport.pan(-(here.x - before.x) / Math.max(1, canvas.clientWidth - drawing.gutter));
    });
    const up = (event: PointerEvent): void => {
      this.pointers.delete(event.pointerId);
      pinch = 0;
    };
    canvas.addEventListener("pointerup", (event) => {
      if (moved <= 3) {
        const { x, y } = at(event);
        this.select(drawing.spot(x, y), drawing);
      }
      up(event);
    });
    canvas.addEventListener("pointercancel", up);
    canvas.addEventListener("pointerleave", () => {
      drawing.hover = null;
      drawing.later();
    });
    canvas.addEventListener("wheel", (event) => {
      if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        this.viewport.pan(((event.deltaX || event.deltaY) / canvas.clientWidth) * 1.0);
      } else if (event.ctrlKey || event.metaKey || document.activeElement === canvas) {
        this.viewport.zoom(Math.exp(event.deltaY * WHEEL), drawing.time(at(event).x) - drawing.shift);
      } else return;
      event.preventDefault();
    }, { passive: false });
    canvas.addEventListener("dblclick", (event) => {
      const spot = drawing.spot(at(event).x, at(event).y);
      if (spot) this.viewport.lookAt(startOf(spot) - drawing.shift, startOf(spot) - drawing.shift + lengthOf(spot));
    });
    canvas.addEventListener("keydown", (event) => this.key(event, drawing));
  }

  private key(event: KeyboardEvent, drawing: Drawing): void {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const keys: Record<string, () => void> = {
      ArrowLeft: () => this.viewport.pan(-0.15),
      ArrowRight: () => this.viewport.pan(0.15),
      a: () => this.viewport.pan(-0.15),
      d: () => this.viewport.pan(0.15),
      "+": () => this.viewport.zoom(1 / 1.6),
      "=": () => this.viewport.zoom(1 / 1.6),
      w: () => this.viewport.zoom(1 / 1.6),
      "-": () => this.viewport.zoom(1.6),
      s: () => this.viewport.zoom(1.6),
      "0": () => this.viewport.all(),
      "1": () => this.oneIteration(),
      n: () => this.nextGap(1),
      p: () => this.nextGap(-1),
      "[": () => this.neighbour(-1, drawing),
      "]": () => this.neighbour(1, drawing),
      "/": () => document.getElementById("search")?.focus(),
      Escape: () => this.select(null, drawing),
    };
    const chosen = keys[event.key];
    if (!chosen) return;
    event.preventDefault();
    chosen();
  }

  private neighbour(direction: number, drawing: Drawing): void {
    const { spot } = drawing.marked;
    if (!spot) return;
    const part = spot.part + direction;
    if (part < 0 || part >= spot.track.count) return;
    const { start, end } = spot.track.parts;
    this.bringIntoView(drawing, start[part], end[part]);
    this.select({ track: spot.track, part }, drawing);
  }

  /** All iterations in one thin row, and which of it is looked at. */
  private drawOverview(): void {
    const { overview, above, viewport } = this;
    const width = overview.parentElement?.clientWidth ?? 0;
    const context = overview.getContext("2d");
    if (!width || !context) return;
    const density = Math.min(window.devicePixelRatio || 1, 2);
    overview.width = width * density;
    overview.height = 18 * density;
    context.setTransform(density, 0, 0, density, 0, 0);
    const { gutter } = above;
    const style = getComputedStyle(document.documentElement);
    const colour = (name: string) => style.getPropertyValue(name).trim();
    context.fillStyle = colour("--panel");
    context.fillRect(0, 0, width, 18);
    context.fillStyle = colour("--paper");
    context.fillRect(gutter, 0, width, 18);
    const scale = (width - gutter) / viewport.length;
    const tracks = above.scene.tracks.filter((track) => track.kind === "gpu");
    context.fillStyle = colour("--computing");
    for (const track of tracks) {
      for (let x = 0; x < width - gutter; x++) {
        let part = track.at(x / scale);
        let busy = 0;
        for (let looked = 0; part < track.count && track.parts.start[part] < (x + 1) / scale && looked < 64; part++, looked++) {
          if (!hasNothingToDo(track.parts.tone[part])) busy += Math.min(track.parts.end[part], (x + 1) / scale) - Math.max(track.parts.start[part], x / scale);
        }
        const height = (10 * Math.min(1, busy * scale)) / tracks.length;
        context.fillRect(gutter + x, 14 - height, 1, height);
      }
    }
    const [left, right] = [viewport.from, viewport.to].map((time) => gutter + Math.min(Math.max(time, 0), viewport.length) * scale);
    context.strokeStyle = colour("--accent");
    context.lineWidth = 1.5;
    context.strokeRect(left + 0.5, 1.5, Math.max(2, right - left - 1), 15);
  }

  /** What is drawn, for the tests. */
  get state(): { from: number; to: number; spot: Spot | null; recorded: boolean; found: number; scene: Scene; fixed: Scene } {
    const { viewport, above, below } = this;
    return { from: viewport.from, to: viewport.to, spot: this.drawings.map((one) => one.marked.spot).find(Boolean) ?? null, recorded: this.asRecorded, found: this.found.length, scene: above.scene, fixed: below.scene };
  }
}

function rowsNamed(moment: Moment, wanted: string): number[] {
  if (!wanted) return [];
  const hit = moment.names.map((name) => name.toLowerCase().includes(wanted));
  const there = moment.places.map((place) => place.text.toLowerCase().includes(wanted));
  return Array.from(moment.name.keys()).filter((row) => hit[moment.name[row]] || hit[moment.call[row]] || there[moment.place[row]]);
}

function laneSays(track: Track | undefined): string {
  if (!track) return "";
  return `${track.label}: ${GLOSSARY[track.label] ?? GLOSSARY.stream}`;
}

/** How much earlier than its row a part is drawn: what runs over the end is drawn once more at the beginning. */
function shiftOf(scene: Scene, { track, part }: Spot): number {
  const { start, end, what } = track.parts;
  const apart = track.kind === "gpu" ? end[part] - scene.end[what[part]] : start[part] - scene.start[what[part]];
  return scene.around > 0 ? Math.round(apart / scene.around) * scene.around : 0;
}

const startOf = ({ track, part }: Spot): number => track.parts.start[part];
const lengthOf = ({ track, part }: Spot): number => track.parts.end[part] - track.parts.start[part];
