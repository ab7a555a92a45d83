// Five steps for who sees a timeline for the first time.

import { element } from "./element";

const STEPS: [selector: string, heading: string, says: string][] = [
  ["#headline", "The verdict", "The largest saving, how busy the GPU is, and why it is not busier."],
  ["#plan", "What to do", "The fixes, in the order in which to make them. Switch one on: the page replays the iterations with it, and every figure follows."],
  ["#timeline", "The timeline", "Above, what Python does; below, what the GPU does with it. Where the GPU is idle it is hatched, in the colour of the cause. Click there: arrows show what it waited for."],
  [".source", "Idle time by line", "Beside each line is the time that the GPU is idle because of it. Click a line or a span to find the other."],
  ["#ledger", "Time of one iteration", "The parts sum to the iteration. Whatever the recording does not explain is shown as unknown."],
];

export function startTour(): void {
  const steps = STEPS.filter(([selector]) => document.querySelector(selector));
  const heading = element("h3");
  const says = element("p");
  const count = element("span", { class: "faint" });
  const next = element("button", { type: "button", class: "primary", on: { click: () => go(at + 1) } });
  const back = element("button", { type: "button", text: "Back", on: { click: () => go(at - 1) } });
  const card = element("dialog", { class: "tour", "aria-label": "Tour" }, heading, says, element("div", { class: "buttons" }, count, element("span", { class: "grow" }), element("button", { type: "button", text: "End", on: { click: () => end() } }), back, next));
  let at = 0;
  const end = (): void => {
    document.querySelector(".toured")?.classList.remove("toured");
    card.remove();
  };
  const go = (step: number): void => {
    if (step >= steps.length) return end();
    at = Math.max(0, step);
    const [selector, title, text] = steps[at];
    document.querySelector(".toured")?.classList.remove("toured");
    const target = document.querySelector<HTMLElement>(selector)!;
    target.classList.add("toured");
    target.scrollIntoView({ block: "start" });
    heading.textContent = title;
    says.textContent = text;
    count.textContent = `${at + 1} of ${steps.length}`;
    back.disabled = at === 0;
    next.textContent = at === steps.length - 1 ? "Done" : "Next";
    next.focus();
  };
  card.addEventListener("keydown", (event) => event.key === "Escape" && end());
  document.querySelector("dialog.tour")?.remove();
  document.body.append(card);
  card.show();
  go(0);
}
