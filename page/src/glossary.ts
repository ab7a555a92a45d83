// What a word means, in one sentence, wherever it is hovered or focused. The words are those of CONTRIBUTING.md.

import { element } from "./element";

export const GLOSSARY: Record<string, string> = {
  turn: "One pass through a loop of the program; a step is a turn of the loop that trains.",
  gap: "A device lane with nothing to do.",
  lane: "One in-order sequence: a host thread, a stream, a copy engine.",
  stream: "A lane of the device: what is put on it runs in order.",
  "at work": "Which share of the time a kernel ran, as the driver tells it.",
  lead: "How far the host is ahead of the device. While it has a lead, the GPU always has work.",
  launch: "The call on the host that hands the device its next command.",
  sync: "A host call that returns only when the device has caught up.",
  plain: "The turns without their recorder: recording slows the host, and what that cost is taken out again. Shares and gains refer to this.",
  recorded: "The turns as the recorder saw them, with what recording cost the host.",
  noise: "Runs of one program differ by as much from time to time: below it, no gain is claimed.",
  replay: "Every span is put where its releases allow it. Whatever a fix changes is the only thing that moves.",
  fix: "A named remedy at a place: its switch replays the turns as they would be with it.",
  cause: "Why a gap is there, named after whoever is late.",
  rank: "One process of several that train together, by PyTorch's number for it.",
  collective: "One operation across ranks: nobody leaves before the last one has arrived.",
  allocated: "Device memory that tensors hold.",
  reserved: "Device memory that PyTorch has taken from the driver and keeps, used or not.",
  GPU: "All lanes of the device as one: computing, copying, exchanging data, or, hatched, nothing at all.",
  "your lines": "The line of your program that was being executed.",
  "called from": "The line of your program that this thread works for.",
  Python: "What the thread that runs your program does: work, launches, and syncs.",
  "backward thread": "The host thread on which PyTorch runs the backward pass, while Python waits for it.",
  "other thread": "A host thread beside the one that runs your program.",
  "loader workers": "Processes that prepare batches, and when Python took one of them.",
  "by workers": "What workers would prepare instead of Python.",
  "copied ahead": "What would be copied beside the compute, before it is needed.",
  "copied back later": "What would travel to the host while the program goes on.",
  "sent meanwhile": "What would be exchanged beside the compute.",
};
/** What the colours of a host lane and of a stream say, by the kind of their spans. */
export const KINDS: Record<number, [name: string, says: string]> = {
  0: ["CPU work", "The host computes, or runs Python."],
  1: ["launch", "The call on the host that hands the device its next command."],
  2: ["sync", "A host call that returns only when the device has caught up."],
  3: ["memory", "Memory is requested from the driver, or given back to it."],
  4: ["recording", "What the recorder took for itself."],
  8: ["computing", "A kernel computes."],
  9: ["copying", "Bytes are copied."],
  10: ["copying", "Memory is filled."],
  11: ["collective", "Data is exchanged with other ranks, or they are waited for."],
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
