// What a word means, in one sentence, wherever it is hovered or focused.

import { element } from "./element";

export const GLOSSARY: Record<string, string> = {
  gap: "A time in which the GPU is idle.",
  stream: "What is put on a stream of the GPU runs in order; streams run beside each other.",
  "GPU busy": "The share of the time in which a kernel ran, as the driver reports it.",
  lead: "While Python is ahead, the GPU always has work.",
  noise: "Runs of one program differ by this much, so no smaller saving is claimed.",
  replay: "The recorded run with a fix applied: whatever the fix does not change keeps its duration.",
  cause: "Why the GPU is idle.",
  rank: "One process of several that train together, by PyTorch's number for it.",
  collective: "One operation across ranks, which ends only when all of them have arrived.",
  allocated: "GPU memory that tensors hold.",
  reserved: "GPU memory that PyTorch has taken from the driver, used or not.",
  GPU: "All streams of the GPU as one: solid is busy, hatched is idle.",
  "your lines": "The line of your program that is being executed.",
  "called from": "The line of your program that this thread works for.",
  Python: "The thread that runs your program: CPU work, launches and syncs.",
  "backward thread": "The thread on which PyTorch runs the backward pass, while Python waits for it.",
  "other thread": "Another thread of your program.",
  "loader workers": "Processes that prepare batches.",
  "by workers": "Work that loader workers would do instead of Python.",
  "copied ahead": "Copies that would run beside the kernels, before they are needed.",
  "copied back later": "Copies to the CPU that would run while the program goes on.",
  "sent meanwhile": "Communication that would run beside the kernels.",
};
/** What the colours of a thread and of a stream mean, by the kind of their spans. */
export const KINDS: Record<number, [name: string, says: string]> = {
  0: ["CPU work", "Python or PyTorch computes on the CPU."],
  1: ["launch", "The call that hands the GPU its next kernel or copy."],
  2: ["sync", "A call that returns only when the GPU has caught up."],
  3: ["memory", "A request to the driver for memory, or its release."],
  4: ["recording", "Time that the recorder itself took."],
  8: ["computing", "A kernel computes."],
  9: ["copying", "A copy."],
  10: ["copying", "Memory is filled."],
  11: ["collective", "Ranks exchange data, or wait for each other."],
};

/** A word that explains itself. */
export function term(word: string, shown = word): HTMLElement {
  return element("span", { class: "term", text: shown, "data-term": word, tabindex: "0" });
}

export function bubble(): HTMLElement {
  const box = element("div", { id: "bubble", role: "tooltip", hidden: true });
  const show = (target: EventTarget | null, x?: number, y?: number): void => {
    const over = target instanceof HTMLElement ? target.closest<HTMLElement>("[data-term], [data-says]") : null;
    const says = over?.dataset.says ?? GLOSSARY[over?.dataset.term ?? ""];
    box.hidden = !says;
    if (!over || !says) return;
    box.textContent = says;
    const { left, bottom, top } = x === undefined || y === undefined ? over.getBoundingClientRect() : { left: x + 10, bottom: y + 8, top: y };
    const wide = Math.min(320, window.innerWidth - 24);
    box.style.setProperty("max-width", `${wide}px`);
    box.style.setProperty("left", `${Math.max(12, Math.min(left, window.innerWidth - wide - 12))}px`);
    const below = bottom + 8 + box.offsetHeight < window.innerHeight;
    box.style.setProperty("top", `${below ? bottom + 8 : top - box.offsetHeight - 8}px`);
  };
  document.addEventListener("pointerover", (event) => show(event.target));
  // what a drawing says depends on where it is pointed at
  document.addEventListener("pointermove", (event) => event.target instanceof HTMLCanvasElement && show(event.target, event.clientX, event.clientY));
  document.addEventListener("focusin", (event) => show(event.target));
  document.addEventListener("focusout", () => (box.hidden = true));
  document.addEventListener("scroll", () => (box.hidden = true), true);
  document.addEventListener("keydown", (event) => event.key === "Escape" && (box.hidden = true));
  return box;
}
