// What to do, in order, each fix with a switch that replays the turns with it.

import { element, section } from "../element";
import { term } from "../glossary";
import type { Fix, Header, Told } from "../run/run";
import { change, duration, range, transition } from "../words";
import type { Choice } from "../choice";

export function planSection(header: Header, told: Told, choice: Choice | null): HTMLElement | null {
  if (!told.plan.length) return null;
  const result = element("p", { class: "result", role: "status" });
  const list = element("ol", { class: "plan" });
  for (const fix of told.plan) list.append(entry(header, told, fix, choice));
  const turn = told.script ? "The script" : "A turn";
  choice?.onFixes((view) => {
    const on = view.fixed.map((fix) => fix + 1);
    const last = told.plan[view.fixed[view.fixed.length - 1]];
    // the plan's range is that of all fixes up to this one
    const same = last && on.length === last.number + 1 && Math.abs(last.predicted[0] - view.step) < told.noise;
    const among = same ? ` (${range(last.predicted[1], last.predicted[2], told.step)})` : "";
    result.textContent = on.length
      ? `With ${on.length > 1 ? "fixes" : "fix"} ${on.join(", ")}: ${turn.toLowerCase()} takes ${duration(view.step)}${among} instead of ${duration(told.step)}, ${change(told.step, view.step)}. The timeline below shows both.`
      : `Switch a fix on: the turns are replayed with it, alone or together with others.`;
  });
  const every = (on: boolean) => () => choice?.fixes(on ? told.plan.filter((fix) => fix.replayed).map((fix) => fix.number) : []);
  const buttons = element("div", { class: "buttons" });
  if (choice && told.plan.filter((fix) => fix.replayed).length > 1) {
    buttons.append(element("button", { type: "button", text: "All on", on: { click: every(true) } }), element("button", { type: "button", text: "All off", on: { click: every(false) } }));
  }
  const made = section("plan", "What to do", "", list, element("div", { class: "after" }, result, buttons));
  const noise = told.noise ? element("p", { class: "faint" }, "Gains below ", element("b", { text: duration(told.noise) }), " are ", term("noise"), ".") : null;
  if (noise) made.append(noise);
  return made;
}

/** What to do first, beneath the headline of a page whose plan stands below the run. */
export function firstFix(header: Header, told: Told): HTMLElement | null {
  const [fix] = told.plan;
  if (!fix) return null;
  const to = element("button", { type: "button", class: "place", text: fix.fix + (fix.where.length ? ` at ${fix.where[0].text}` : ""), on: { click: () => document.getElementById("plan")?.scrollIntoView({ behavior: "smooth" }) } });
  const [turn, run] = gains(header, fix);
  return element("p", {}, "What to do first: ", to, ", ", run ?? turn, ".");
}

/** What a turn takes without it and with it, and what the run does, as far as these are known. */
function gains(header: Header, fix: Fix): (HTMLElement | null)[] {
  const step = fix.predicted[0];
  const after = (saved: number): number => Math.max(0, (header.run?.time ?? 0) - saved);
  return [
    fix.before > step ? element("span", { class: "gain", text: `${transition(fix.before, step)} ${fix.turns}` }) : null,
    header.run && fix.run ? element("span", { class: "gain", text: `the run ${transition(after(fix.run[0]), after(fix.run[1]))}` }) : null,
  ];
}

function entry(header: Header, told: Told, fix: Fix, choice: Choice | null): HTMLElement {
  const id = `fix-${fix.number}`;
  const flip = element("input", {
    type: "checkbox",
    role: "switch",
    id,
    disabled: !fix.replayed || !choice,
    on: { change: () => choice?.toggle(fix.number) },
  });
  choice?.onFixes((view) => (flip.checked = view.fixed.includes(fix.number)));
  const where = fix.where.flatMap((place, index) => [
    index ? ", " : " at ",
    element("button", { class: "place", type: "button", text: place.text, on: { click: () => choice?.line(place.file, place.line) } }),
  ]);
  const others = fix.more ? element("span", { class: "faint", text: ` and ${fix.more} more` }) : null;
  const [, low, high] = fix.predicted;
  const [turn, run] = gains(header, fix);
  const among = turn ? element("span", { class: "faint", text: ` (${range(low, high, fix.before)})` }) : null;
  const notes: string[] = [];
  if (!fix.replayed) notes.push(fix.loop ? "It changes another loop than the one drawn here." : "It is known from the whole run: in the turns drawn here there is nothing to replay.");
  if (fix.needs.length) notes.push(`${fix.alone <= told.noise ? "Alone it gains nothing; it" : "It"} goes together with ${fix.needs.join(" and ")}.`);
  if (fix.instead.length) notes.push(`Or ${fix.instead[0]} instead: either of the two.`);
  return element(
    "li",
    {},
    element(
      "div",
      { class: "entry" },
      element("label", { class: "flip", for: id }, flip, element("span", { class: "knob", "aria-hidden": "true" }), element("span", { class: "number", text: String(fix.number + 1) })),
      element("div", { class: "what" },
        element("p", { class: "name" }, element("label", { for: id, text: fix.fix }), ...where, others),
        element("p", { class: "gains" }, turn, among, turn && run ? " · " : "", run),
        ...fix.says.map((said) => element("p", { text: said })),
        fix.code ? element("pre", {}, element("code", { text: fix.code })) : null,
        ...notes.map((note) => element("p", { class: "faint", text: note })),
      ),
    ),
  );
}
