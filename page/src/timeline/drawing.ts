// The drawing of one view on a canvas. Parts narrower than a pixel are drawn together, a column at a time: so much of
// the column is filled as they fill of its time. So a million spans cost no more than the pixels they stand on.

import type { Place } from "../run/run";
import { NONE } from "../run/timeline";
import { duration, kernel, shortened } from "../words";
import { Paint } from "./paint";
import { launchRow } from "./releases";
import { GPU, SPARSE, arrival, causeOf, isGap, spanName, type Scene } from "./scene";
import type { Track } from "./track";
import type { Viewport } from "./viewport";

const RULER = 22;
const GAP = 3;
/** Pixels between streams of which one waits for another. */
const ROOM_FOR_ARROWS = 17;
const GROUP = 10;
const NARROW = 560;
const WIDE_GUTTER = 122;
const FEW = 9;
const LETTER = 5.7;
/** Pixels: what is narrower bears no text. */
const LEAST_NAMED = 34;
const MOST_EVENTS = 24;
const MISSING = "nothing orders these two";
const SHORT: Record<string, string> = { "your lines": "lines", "called from": "from", "backward thread": "backward", "loader workers": "workers" };
const FONT = "11px system-ui, sans-serif";

/** A part of a track, as a pointer finds it. */
export interface Spot {
  track: Track;
  part: number;
}

export interface Arrow {
  from: number;
  fromTime: number;
  to: number;
  toTime: number;
  into: boolean;
}

export interface Marked {
  spot: Spot | null;
  arrows: Arrow[];
  /** Rows of the moment that a search found, and the place that is looked at. */
  found: Set<number> | null;
  place: number;
}

export class Drawing {
  readonly canvas: HTMLCanvasElement;
  private readonly context: CanvasRenderingContext2D;
  private paint: Paint;
  private width = 800;
  height = 100;
  gutter = WIDE_GUTTER;
  marked: Marked = { spot: null, arrows: [], found: null, place: NONE };
  hover: Spot | null = null;
  /** How much later than in the first drawing the same iteration begins. */
  shift = 0;
  private waiting = false;

  constructor(public scene: Scene, readonly viewport: Viewport, label: string) {
    this.canvas = document.createElement("canvas");
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "img");
    this.canvas.setAttribute("aria-label", label);
    this.context = this.canvas.getContext("2d", { alpha: false })!;
    this.paint = new Paint(this.context, scene.moment.causes);
    this.lay();
    viewport.onChange(() => this.later());
  }

  change(scene: Scene): void {
    this.scene = scene;
    this.lay();
    this.resize();
  }

  recolour(): void {
    this.paint = new Paint(this.context, this.scene.moment.causes);
    this.later();
  }

  private lay(): void {
    let y = RULER;
    const few = this.scene.tracks.length <= FEW;
    const { events, missing } = this.scene;
    const between = few && events.length + missing.length ? ROOM_FOR_ARROWS : GAP;
    for (const track of this.scene.tracks) {
      if (few) track.height = track.tall;
      if (track.heading) y += y > RULER ? 24 : 16;
      track.y = y;
      y += track.height + (track.kind === "lines" ? 0 : track.kind === "stream" ? between : GAP);
    }
    this.height = y + GROUP;
  }

  resize(): void {
    const width = this.canvas.parentElement?.clientWidth ?? 0;
    if (!width) return;
    this.width = width;
    this.gutter = width < NARROW ? 62 : WIDE_GUTTER;
    const density = Math.min(window.devicePixelRatio || 1, 2);
    this.canvas.width = Math.round(width * density);
    this.canvas.height = Math.round(this.height * density);
    this.canvas.style.setProperty("height", `${this.height}px`);
    this.context.setTransform(density, 0, 0, density, 0, 0);
    this.draw();
  }

  later(): void {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      this.draw();
    });
  }

  private get from(): number {
    return this.viewport.from + this.shift;
  }

  time(x: number): number {
    return this.from + ((x - this.gutter) / (this.width - this.gutter)) * this.viewport.span;
  }

  x(time: number): number {
    return this.gutter + ((time - this.from) / this.viewport.span) * (this.width - this.gutter);
  }

  trackAt(y: number): Track | undefined {
    return this.scene.tracks.find((one) => y >= one.y - 1 && y < one.y + one.height + 1);
  }

  /** What stands there; a little beside it, if that is all there is. */
  spot(x: number, y: number): Spot | null {
    const track = this.trackAt(y);
    if (x < this.gutter || !track) return null;
    const near = (3 * this.viewport.span) / this.width;
    const time = this.time(x);
    const part = track.at(time - near);
    let best = NONE;
    let least = near;
    for (let one = part; one < track.count && track.parts.start[one] <= time + near; one++) {
      const apart = Math.max(track.parts.start[one] - time, time - track.parts.end[one], 0);
      if (best === NONE ? apart <= least : apart < least) [best, least] = [one, apart];
      if (!apart) break;
    }
    return best === NONE ? null : { track, part: best };
  }

  /** Where the drawing has this row of its view: on the lane it runs on. */
  spotOf(row: number): Spot | null {
    const { start } = this.scene;
    const track = this.trackOf(row);
    if (!track) return null;
    let part = track.at(start[row]);
    while (part < track.count && track.parts.what[part] !== row && track.parts.start[part] <= start[row]) part++;
    return part < track.count ? { track, part: track.parts.what[part] === row ? part : track.parts.what.indexOf(row) } : null;
  }

  private trackOf(row: number): Track | undefined {
    const lane = this.scene.timeline.lane[row];
    return this.scene.tracks.find((one) => one.lane === lane && one.kind !== "lines");
  }

  draw(): void {
    const { context, width, height, paint } = this;
    if (!this.canvas.offsetParent) return; // nobody sees it
    context.fillStyle = paint.paper;
    context.fillRect(0, 0, width, height);
    context.font = FONT;
    context.textBaseline = "middle";
    this.ruler();
    context.save();
    context.beginPath();
    context.rect(this.gutter, 0, width - this.gutter, height);
    context.clip();
    this.iterations();
    for (const track of this.scene.tracks) this.track(track);
    this.arrows();
    this.missing();
    context.restore();
    this.labels();
  }

  private ruler(): void {
    const { context, paint, viewport } = this;
    const step = niceStep((viewport.span * 90) / Math.max(1, this.width - this.gutter));
    context.fillStyle = paint.soft;
    context.strokeStyle = paint.line;
    context.lineWidth = 1;
    const first = Math.ceil(this.from / step) * step;
    for (let time = first; time <= this.from + viewport.span; time += step) {
      const x = Math.round(this.x(time)) + 0.5;
      if (x < this.gutter - 1) continue;
      context.beginPath();
      context.moveTo(x, RULER - 5);
      context.lineTo(x, this.height);
      context.globalAlpha = 0.45;
      context.stroke();
      context.globalAlpha = 1;
      const text = Math.round(time) === 0 ? "0" : tick(time, step);
      if (x + text.length * LETTER < this.width) context.fillText(text, x + 4, 10);
    }
  }

  private iterations(): void {
    const { context, paint } = this;
    context.strokeStyle = paint.soft;
    context.setLineDash([2, 3]);
    for (const iteration of this.scene.iterations) {
      const x = Math.round(this.x(iteration.start)) + 0.5;
      context.beginPath();
      context.moveTo(x, RULER - 4);
      context.lineTo(x, this.height);
      context.stroke();
    }
    context.setLineDash([]);
  }

  private track(track: Track): void {
    const { viewport, width, gutter } = this;
    const { start, end, tone } = track.parts;
    const scale = (width - gutter) / viewport.span;
    const column = 1 / scale;
    let part = track.at(this.from);
    while (part < track.count && start[part] < this.from + viewport.span) {
      const x = this.x(start[part]);
      const wide = (end[part] - start[part]) * scale;
      if (wide >= 1.5) {
        this.rectangle(track, part, x, wide, tone[part]);
        part++;
        continue;
      }
      // columns of pixels, up to the next part that is wide enough to be seen by itself
      const left = Math.max(Math.floor(x), gutter);
      const until = this.from + (left + 1 - gutter) * column;
      const next = track.at(until, part);
      this.column(track, left, until - column, until, part, next);
      part = Math.max(next, part + 1);
    }
    if (track.boxes) this.boxes(track, track.boxes);
  }

  /** The user's lines on a stream, over what each of them launched in an iteration. */
  private boxes(track: Track, boxes: Track): void {
    const { start, end, tone, what } = boxes.parts;
    const least = (LEAST_NAMED * this.viewport.span) / (this.width - this.gutter);
    for (let box = boxes.at(this.from); box < boxes.count && start[box] < this.from + this.viewport.span; box++) {
      if (what[box] === NONE || end[box] - start[box] < least) continue;
      const isSparse = tone[box] === SPARSE;
      const ink = this.paint.of("stream", tone[box]);
      for (const [from, to] of runsIn(boxes, box, least)) {
        const left = Math.max(this.x(from), this.gutter);
        const shown = Math.min(this.x(to), this.width) - left;
        this.text(lineIn(this.scene.moment.places[what[box]], Math.floor((shown - 8) / LETTER)), left, shown, track, isSparse ? this.paint.ink : ink.text, !isSparse, ink.fill);
      }
    }
  }

  private isInBox({ boxes, parts }: Track, part: number): boolean {
    return boxes !== null && boxes.parts.what[boxes.at(parts.start[part])] !== NONE;
  }

  private rectangle(track: Track, part: number, x: number, wide: number, tone: number): void {
    const { context } = this;
    const left = Math.max(x, this.gutter - 2);
    const right = Math.min(x + wide, this.width + 2);
    const ink = this.paint.of(track.kind, tone);
    const shown = Math.max(right - left - (wide > 5 ? 0.6 : 0), 1);
    context.globalAlpha = this.faded(track, part) ? 0.22 : 1;
    context.fillStyle = ink.fill;
    context.fillRect(left, track.y, shown, track.height);
    if (ink.pattern && shown > 3) {
      context.fillStyle = ink.pattern;
      context.fillRect(left, track.y, shown, track.height);
    }
    const chosen = this.marked.spot;
    const name = track.kind === "lines" ? lineIn(this.scene.moment.places[track.parts.what[part]], Math.floor((shown - 8) / LETTER)) : this.label(track, part);
    if (shown > LEAST_NAMED && !this.isInBox(track, part)) this.text(name, left, shown, track, ink.text, Boolean(ink.pattern), ink.fill);
    context.globalAlpha = 1;
    const same = chosen && chosen.track === track && chosen.part === part;
    if (same || (this.hover && this.hover.track === track && this.hover.part === part)) {
      context.strokeStyle = same ? this.paint.accent : this.paint.ink;
      context.lineWidth = same ? 2.5 : 1.2;
      context.strokeRect(left + 0.5, track.y + 0.5, Math.max(shown - 1, 1), track.height - 1);
    }
  }

  /** One column of pixels: of the GPU its gaps above its work, of others as much ink as there is time in it. */
  private column(track: Track, left: number, from: number, to: number, first: number, last: number): void {
    const { context } = this;
    const sums = track.within(from, to, first, last);
    let y = track.y + track.height;
    let whole = 0;
    let longest = 0;
    let tone = 0;
    for (const [one, time] of sums) {
      whole += time;
      if (time > longest) [longest, tone] = [time, one];
    }
    if (!whole) return;
    if (track.kind === "gpu") {
      for (const [one, time] of sums) {
        const height = (track.height * time) / (to - from);
        context.fillStyle = this.paint.of(track.kind, one).fill;
        context.fillRect(left, (y -= height), 1, height);
      }
      return;
    }
    context.globalAlpha = 0.25 + 0.75 * Math.min(1, whole / (to - from));
    context.fillStyle = this.paint.of(track.kind, tone).fill;
    context.fillRect(left, track.y, 1, track.height);
    context.globalAlpha = 1;
  }

  private text(label: string, left: number, shown: number, track: Track, ink: string, hatched: boolean, fill: string): void {
    const { context } = this;
    const fits = Math.floor((shown - 8) / LETTER);
    if (fits < 3 || !label) return;
    const text = fitting(label, fits);
    if (!text) return;
    if (hatched) {
      const wide = Math.min(context.measureText(text).width + 6, shown - 2);
      context.fillStyle = fill;
      context.fillRect(left + 2, track.y + 3, wide, track.height - 6);
    }
    context.fillStyle = ink;
    context.fillText(text, left + 5, track.y + track.height / 2 + 0.5, shown - 8);
  }

  /** What a search or a chosen line leaves aside. */
  private faded(track: Track, part: number): boolean {
    const { found, place } = this.marked;
    const { moment, base } = this.scene;
    const what = track.parts.what[part];
    if (track.kind === "lines") return place !== NONE ? what !== place : found !== null;
    if (track.kind === "gpu") return false;
    if (found !== null) return !found.has(base[what]);
    return place !== NONE && track.kind === "host" && moment.place[base[what]] !== place;
  }

  label(track: Track, part: number): string {
    const { moment, base } = this.scene;
    const { what, tone } = track.parts;
    if (track.kind === "lines") return moment.places[what[part]].text.replace(/^about .*\//, "about ").replace(/^.*\//, "");
    const row = base[what[part]];
    if (track.kind !== "gpu") return track.kind === "stream" ? kernel(moment.names[moment.name[row]]) : spanName(moment, row);
    if (tone[part] < GPU.GAP) return ["computing", "copying", "collective"][tone[part]];
    const culprit = isGap(tone[part]) ? moment.culprit[row] : launchRow(this.scene, what[part]);
    const place = culprit === NONE ? NONE : moment.place[isGap(tone[part]) ? culprit : base[culprit]];
    const at = place === NONE ? "" : ` · ${moment.places[place].text.replace(/^.*\//, "")}`;
    return `${this.causeName(causeOf(tone[part]))}${at}`;
  }

  /** Set by the page, which knows how reports call a cause. */
  causeName: (cause: number) => string = String;

  /** What waits for an event, where few of them are seen; not while something else is looked at. */
  private events(): Arrow[] {
    const { scene } = this;
    if (this.marked.spot) return [];
    const shown = scene.events.flatMap(([from, to]) =>
      this.seen(scene.end[from], arrival(scene, to)).map(([fromTime, toTime]): Arrow => ({ from, to, fromTime, toTime, into: true })),
    );
    return shown.length <= MOST_EVENTS ? shown : [];
  }

  /** Two moments as often as both are seen: a GPU that is behind does what iterations before have launched. */
  private seen(first: number, second: number): [first: number, second: number][] {
    const { from, scene: { around } } = this;
    const until = from + this.viewport.span;
    const [early, late] = [Math.min(first, second), Math.max(first, second)];
    if (!around) return early >= from && late <= until ? [[first, second]] : [];
    const found: [number, number][] = [];
    for (let back = Math.max(0, Math.ceil((late - until) / around)); early - back * around >= from; back++) found.push([first - back * around, second - back * around]);
    return found;
  }

  private arrows(): void {
    const { context, paint } = this;
    for (const arrow of [...this.events(), ...this.marked.arrows]) {
      const from = this.trackOf(arrow.from);
      const to = this.trackOf(arrow.to);
      if (!from || !to) continue;
      const [x1, x2] = [this.x(arrow.fromTime), this.x(arrow.toTime)];
      const down = to.y > from.y;
      const y1 = from.y + (down ? from.height : 0);
      const y2 = to === from ? y1 : to.y + (down ? 0 : to.height);
      const bend = Math.max(14, Math.min(60, Math.abs(x2 - x1) / 2));
      context.strokeStyle = context.fillStyle = arrow.into ? paint.accent : paint.released;
      context.lineWidth = 1.8;
      context.setLineDash(arrow.into ? [] : [5, 3]);
      context.beginPath();
      context.moveTo(x1, y1);
      context.bezierCurveTo(x1 + bend, y1 + (down ? 6 : -6), x2 - bend, y2 + (down ? -6 : 6), x2, y2);
      context.stroke();
      this.ends(x1, y1, x2, y2, down);
    }
  }

  /**
   * From where the first is when the second begins, or from its begin if that comes later: dashed and crossed out, for
   * nothing orders them.
   */
  private missing(): void {
    const { context, paint, scene } = this;
    const missing = scene.missing.flatMap(([first, second]) => {
      const began = scene.start[second];
      const since = scene.start[first] > began ? scene.start[first] : Math.min(scene.end[first], began);
      return this.seen(since, began).map((times) => [first, second, ...times]);
    });
    for (const [first, second, since, began] of missing) {
      const from = this.trackOf(first);
      const to = this.trackOf(second);
      if (!from || !to) continue;
      const [x1, x2] = [this.x(since), this.x(began)];
      const down = to.y > from.y;
      const [y1, y2] = [from.y + (down ? from.height : 0), to.y + (down ? 0 : to.height)];
      const [x, y] = [(x1 + x2) / 2, (y1 + y2) / 2];
      const lines = (dashed: boolean): void => {
        this.line(x1, y1, x2, y2, dashed);
        this.line(x - 5, y - 5, x + 5, y + 5);
        this.line(x - 5, y + 5, x + 5, y - 5);
      };
      context.strokeStyle = paint.paper;
      context.lineWidth = 5;
      lines(false);
      context.strokeStyle = context.fillStyle = paint.missing;
      context.lineWidth = 2;
      lines(true);
      this.ends(x1, y1, x2, y2, down);
      if (Math.abs(y2 - y1) !== ROOM_FOR_ARROWS) continue;
      const isSlanted = Math.abs(x1 - x2) > 50; // then beside the end of the line
      context.textAlign = x2 + 11 + MISSING.length * LETTER < this.width ? "left" : "right";
      context.fillText(MISSING, x2 + (context.textAlign === "left" ? 11 : -11), isSlanted ? y1 + (down ? 6 : -6) : y + 0.5);
      context.textAlign = "left";
    }
  }

  private line(x1: number, y1: number, x2: number, y2: number, dashed = false): void {
    const { context } = this;
    context.setLineDash(dashed ? [4, 2] : []);
    context.beginPath();
    context.moveTo(x1, y1);
    context.lineTo(x2, y2);
    context.stroke();
  }

  /** The dot at which an arrow begins, and its head. */
  private ends(x1: number, y1: number, x2: number, y2: number, down: boolean): void {
    const { context } = this;
    context.setLineDash([]);
    context.beginPath();
    context.arc(x1, y1, 2.5, 0, 7);
    context.fill();
    context.beginPath();
    context.moveTo(x2, y2);
    context.lineTo(x2 - 7, y2 + (down ? -7 : 7) / 1.6);
    context.lineTo(x2 - 7, y2 + (down ? 3 : -3));
    context.fill();
  }

  private labels(): void {
    const { context, paint } = this;
    const narrow = this.gutter < 100;
    context.fillStyle = paint.paper;
    context.fillRect(0, RULER - 4, this.gutter, this.height);
    context.strokeStyle = paint.line;
    context.beginPath();
    context.moveTo(this.gutter - 0.5, RULER - 4);
    context.lineTo(this.gutter - 0.5, this.height - 4);
    context.stroke();
    for (const track of this.scene.tracks) {
      if (track.heading) {
        context.font = "600 11px system-ui, sans-serif";
        context.fillStyle = paint.ink;
        context.fillText(track.heading, 8, track.y - 9);
        context.font = FONT;
      }
      context.fillStyle = track.kind === "gpu" ? paint.ink : paint.soft;
      if (track.kind === "gpu") context.font = "600 11px system-ui, sans-serif";
      context.textAlign = "right";
      context.fillText(narrow ? shortened(SHORT[track.label] ?? /\((.+)\)/.exec(track.label)?.[1] ?? track.label, 10) : shortened(track.label, 19), this.gutter - (narrow ? 5 : 9), track.y + track.height / 2 + 0.5);
      context.textAlign = "left";
      context.font = FONT;
    }
  }
}

/** When a box begins and ends; if each of its runs is wide enough for a name, when each of them does. */
function runsIn({ parts, boxes }: Track, box: number, least: number): [from: number, to: number][] {
  const whole: [number, number] = [parts.start[box], parts.end[box]];
  const found: [number, number][] = [];
  for (let run = boxes!.at(whole[0]); run < boxes!.count && boxes!.parts.start[run] < whole[1]; run++) {
    const { start, end } = boxes!.parts;
    if (end[run] - start[run] < least) return [whole];
    found.push([start[run], end[run]]);
  }
  return found;
}

/** `21 result = batch @ weights`, as much of it as fits. */
function lineIn({ source, line, text }: Place, letters: number): string {
  const number = line ? String(line) : "";
  const whole = source && number ? `${number} ${source}` : text.replace(/^about .*\//, "about ").replace(/^.*\//, "");
  if (whole.length <= letters) return whole;
  if (letters >= number.length + 4 && (source || !number)) return `${whole.slice(0, letters - 1)}…`;
  return number.length <= letters ? number : "";
}

/** As much of it as fits: a place without its file, a cause without its place. */
function fitting(label: string, letters: number): string {
  if (label.length <= letters) return label;
  const [cause, place] = label.split(" · ");
  if (place) {
    const brief = `${cause} ${/:\d+(?= |$)/.exec(place)?.[0] ?? ""}`;
    return [brief, cause].find((one) => one.length <= letters) ?? "";
  }
  const line = /^[^ ]+(:\d+)$/.exec(label)?.[1];
  if (line) return letters >= 14 ? shortened(label, letters) : line.length <= letters ? line : "";
  return letters < Math.min(8, label.length) ? "" : shortened(label, letters);
}

function niceStep(least: number): number {
  const power = 10 ** Math.floor(Math.log10(Math.max(least, 1)));
  return power * ([1, 2, 5].find((one) => one * power >= least) ?? 10);
}

function tick(time: number, step: number): string {
  if (step >= 1e9) return `${Math.round(time / 1e9)} s`;
  if (step >= 1e6) return time >= 1e9 ? `${(time / 1e9).toFixed(step < 1e7 ? 3 : 2)} s` : `${Math.round(time / 1e6)} ms`;
  if (step >= 1e3) return `${(time / 1e6).toFixed(Math.max(0, 6 - Math.floor(Math.log10(step))))} ms`;
  return duration(time);
}
