// What the reader has chosen: which iterations, which fixes, which span, which line. The parts of the page listen to it.

import type { Moment } from "./run/run";
import { recorded, replayed, type Scene } from "./timeline/scene";

export class Choice {
  private on: number[] = [];
  private fixListeners: ((view: Scene) => void)[] = [];
  private lineListeners: ((file: string, line: number) => void)[] = [];
  private causeListeners: ((cause: string) => void)[] = [];
  private views = new Map<string, Scene>();

  constructor(readonly moment: Moment) {}

  /** The iterations as they are. */
  get now(): Scene {
    return this.view([]);
  }

  /** As they would be with the fixes that are switched on. */
  get then(): Scene {
    return this.view(this.on);
  }

  get recorded(): Scene {
    const known = this.views.get("recorded") ?? recorded(this.moment);
    this.views.set("recorded", known);
    return known;
  }

  private view(fixes: number[]): Scene {
    const key = fixes.join();
    const known = this.views.get(key) ?? replayed(this.moment, fixes);
    if (this.views.size > 6) this.views.clear(); // of large runs each view takes its room
    this.views.set(key, known);
    return known;
  }

  fixes(chosen: number[]): void {
    this.on = [...chosen].sort((one, other) => one - other);
    const view = this.then;
    for (const listener of this.fixListeners) listener(view);
  }

  toggle(fix: number): void {
    this.fixes(this.on.includes(fix) ? this.on.filter((one) => one !== fix) : [...this.on, fix]);
  }

  onFixes(listener: (view: Scene) => void): void {
    this.fixListeners.push(listener);
  }

  line(file: string, line: number): void {
    for (const listener of this.lineListeners) listener(file, line);
  }

  onLine(listener: (file: string, line: number) => void): void {
    this.lineListeners.push(listener);
  }

  cause(cause: string): void {
    for (const listener of this.causeListeners) listener(cause);
  }

  onCause(listener: (cause: string) => void): void {
    this.causeListeners.push(listener);
  }
}
