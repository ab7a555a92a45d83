// Which stretch of time is looked at. Several drawings may look through one viewport.

export class Viewport {
  from = 0;
  to = 1;
  private listeners: (() => void)[] = [];

  constructor(public length: number) {
    this.to = length;
  }

  onChange(listener: () => void): void {
    this.listeners.push(listener);
  }

  get span(): number {
    return this.to - this.from;
  }

  show(from: number, to: number): void {
    const span = Math.min(Math.max(to - from, 100), this.length * 1.04);
    const least = -0.02 * this.length;
    const most = 1.02 * this.length;
    this.from = Math.min(Math.max((from + to) / 2 - span / 2, least), most - span);
    this.to = this.from + span;
    for (const listener of this.listeners) listener();
  }

  all(): void {
    this.show(-0.01 * this.length, 1.01 * this.length);
  }

  zoom(factor: number, around = (this.from + this.to) / 2): void {
    this.show(around - (around - this.from) * factor, around + (this.to - around) * factor);
  }

  pan(share: number): void {
    this.show(this.from + share * this.span, this.to + share * this.span);
  }

  /** So that this stretch is in the middle and takes a third of what is seen. */
  lookAt(start: number, end: number): void {
    const span = Math.max(end - start, this.length / 2_000) * 3;
    this.show((start + end) / 2 - span / 2, (start + end) / 2 + span / 2);
  }
}
