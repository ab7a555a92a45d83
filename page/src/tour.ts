// Five steps for who sees a timeline for the first time.

import { element } from "./element";

const STEPS: [selector: string, heading: string, says: string][] = [
  ["#headline", "What the run took", "Begin here: how long it all was, and how much of that the GPU computed. The rest is what there is to gain."],
  ["#plan", "What to do", "Fixes, in the order in which to do them. Switch one on: the turns are replayed with it, here in the page, and every figure follows."],
  ["#turn", "Who waits for whom", "Above, what the host does; below, what the GPU does with it. Hatched is a gap, in the colour of its cause, with its line. Click one: arrows show what released its end."],
  [".source", "The line to blame", "Beside each line stands what the GPU waits for it. Lines and spans select each other."],
  ["#ledger", "Where a turn goes", "Every nanosecond of a turn has a place. What the recording does not explain is called unknown, and is shown."],
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
