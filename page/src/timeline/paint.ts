// Colours and patterns of what is drawn, read from the style sheet, so that light and dark are told apart in one place.

import { GPU, causeOf } from "./scene";
import type { TrackKind } from "./track";

export interface Ink {
  fill: string;
  text: string;
  pattern: CanvasPattern | null;
}

export const HATCHES: Record<string, string> = {
  host_sync: "slope",
  blocking_copy: "back",
  copy_not_overlapped: "rows",
  input_late: "dots",
  made_on_host: "cross",
  launch_bound: "columns",
  allocator: "grid",
  host_work: "slope wide",
  peer_late: "columns wide",
  exposed_collective: "rows wide",
  pipeline_bubble: "dots wide",
  unknown: "",
  recorder: "",
};

const HOST_TONES: Record<number, string> = { 0: "work", 1: "launch", 2: "sync", 3: "allocate", 4: "recording" };
const DEVICE_TONES: Record<number, string> = { 8: "computing", 9: "copying", 10: "copying", 11: "collective" };

export class Paint {
  readonly ink: string;
  readonly soft: string;
  readonly line: string;
  readonly paper: string;
  readonly accent: string;
  readonly released: string;
  readonly missing: string;
  private readonly inks = new Map<string, Ink>();
  private readonly style: CSSStyleDeclaration;

  constructor(private readonly context: CanvasRenderingContext2D, private readonly causes: string[]) {
    this.style = getComputedStyle(document.documentElement);
    this.ink = this.colour("--ink");
    this.soft = this.colour("--soft");
    this.line = this.colour("--line");
    this.paper = this.colour("--panel");
    this.accent = this.colour("--accent");
    this.released = this.colour("--released");
    this.missing = this.colour("--missing");
  }

  of(kind: TrackKind, tone: number): Ink {
    if (kind === "lines") return this.named(tone ? "band-odd" : "band-even");
    if (kind === "host") return this.named(HOST_TONES[tone] ?? "work");
    if (kind === "stream") return this.named(DEVICE_TONES[tone] ?? "computing");
    if (tone < GPU.GAP) return this.named(["computing", "copying", "collective"][tone]);
    const cause = this.causes[causeOf(tone)] ?? "recorder";
    if (tone < GPU.ASIDE) return this.named(cause);
    const work = this.named(cause === "exposed_collective" ? "collective" : "copying");
    return { ...work, pattern: this.named(cause).pattern };
  }

  named(name: string): Ink {
    const known = this.inks.get(name);
    if (known) return known;
    const fill = this.colour(`--${name}`) || "#888";
    const made = { fill, text: readable(fill), pattern: hatch(this.context, HATCHES[name] ?? "", readable(fill)) };
    this.inks.set(name, made);
    return made;
  }

  private colour(name: string): string {
    return this.style.getPropertyValue(name).trim();
  }
}

/** Black or white, whichever stands out more. */
export function readable(fill: string): string {
  const hex = fill.replace("#", "");
  const channel = (at: number): number => {
    const value = parseInt(hex.slice(at, at + 2), 16) / 255;
    return value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  };
  const luminance = 0.2126 * channel(0) + 0.7152 * channel(2) + 0.0722 * channel(4);
  return luminance > 0.19 ? "#101418" : "#ffffff";
}

function hatch(context: CanvasRenderingContext2D, kind: string, ink: string): CanvasPattern | null {
  if (!kind) return null;
  const [form, wide] = kind.split(" ");
  const size = wide ? 12 : 7;
  const tile = document.createElement("canvas");
  tile.width = tile.height = size;
  const pen = tile.getContext("2d")!;
  pen.strokeStyle = pen.fillStyle = ink;
  pen.globalAlpha = 0.28;
  pen.lineWidth = wide ? 1.6 : 1.2;
  const stroke = (...points: number[]): void => {
    pen.beginPath();
    for (let at = 0; at < points.length; at += 4) {
      pen.moveTo(points[at], points[at + 1]);
      pen.lineTo(points[at + 2], points[at + 3]);
    }
    pen.stroke();
  };
  const half = size / 2;
  if (form === "slope" || form === "cross") stroke(-1, size + 1, size + 1, -1, -1, 1, 1, -1, size - 1, size + 1, size + 1, size - 1);
  if (form === "back" || form === "cross") stroke(-1, -1, size + 1, size + 1, size - 1, -1, size + 1, 1, -1, size - 1, 1, size + 1);
  if (form === "rows" || form === "grid") stroke(0, half, size, half);
  if (form === "columns" || form === "grid") stroke(half, 0, half, size);
  if (form === "dots") {
    pen.globalAlpha = 0.4;
    pen.beginPath();
    pen.arc(half, half, wide ? 1.6 : 1.1, 0, 7);
    pen.fill();
  }
  return context.createPattern(tile, "repeat");
}
