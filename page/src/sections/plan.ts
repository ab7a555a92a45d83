// What to do, in order, in the words of the verdict; each fix has a switch that replays the iterations with it.

import { element, section } from "../element";
import { term } from "../glossary";
import type { Analysis, Fix } from "../run/run";
import { change, duration, leading, range } from "../words";
import type { Choice } from "../choice";

export function planSection(analysis: Analysis, choice: Choice | null): HTMLElement | null {
  if (!analysis.plan.length) return null;
  const result = element("p", { class: "result", role: "status" });
  const list = element("ol", { class: "plan" }, ...analysis.plan.map((fix) => entry(analysis, fix, choice)));
  const what = analysis.script ? "the script" : "an iteration";
  const replayed = analysis.plan.filter((fix) => fix.replayed).map((fix) => fix.number);
  choice?.onFixes((view) => {
    const on = view.fixed.map((fix) => fix + 1);
    const last = analysis.plan[view.fixed[view.fixed.length - 1]];
    // the plan's range is that of all fixes up to this one
    const same = last && on.length === last.number + 1 && Math.abs(last.predicted[0] - view.step) < analysis.noise;
    const among = same ? ` (${range(last.predicted[1], last.predicted[2], analysis.step)})` : "";
    result.textContent = on.length
      ? `With ${on.length > 1 ? "fixes" : "fix"} ${on.join(", ")}, ${what} takes ${duration(view.step)}${among} instead of ${duration(analysis.step)}: ${change(analysis.step, view.step)}. The timeline below shows both.`
      : replayed.length ? "Switch a fix on to replay the iterations with it." : "";
  });
  const turnOn = (fixes: number[]) => ({ click: () => choice?.fixes(fixes) });
  const buttons = choice && replayed.length > 1
    ? element("div", { class: "buttons" }, element("button", { type: "button", text: "All on", on: turnOn(replayed) }), element("button", { type: "button", text: "All off", on: turnOn([]) }))
    : null;
  const noise = analysis.noise ? element("span", { class: "faint" }, term("noise", "Noise"), `: ±${duration(analysis.noise)}`) : null;
  const total = analysis.total ? element("p", { class: "gain total", text: analysis.total }) : null;
  return section("plan", "What to do", "", list, total, choice && (replayed.length || noise) ? element("div", { class: "after" }, result, noise, buttons) : null);
}

function entry(analysis: Analysis, fix: Fix, choice: Choice | null): HTMLElement {
  const id = `fix-${fix.number}`;
  const flip = element("input", {
    type: "checkbox",
    role: "switch",
    id,
    disabled: !fix.replayed || !choice,
    on: { change: () => choice?.toggle(fix.number) },
  });
  choice?.onFixes((view) => (flip.checked = view.fixed.includes(fix.number)));
  const { where } = fix;
  const place = !fix.place ? null : where?.file
    ? element("button", { class: "place", type: "button", text: fix.place, on: { click: () => choice?.line(where.file, where.line) } })
    : element("span", { class: "place", text: fix.place });
  const notes: string[] = [];
  if (!fix.replayed) notes.push(fix.loop ? "This fix changes another loop than the one drawn here." : "Estimated from the whole run, so it cannot be replayed here.");
  if (fix.needs.length) notes.push(`${fix.alone <= analysis.noise ? "Alone it saves nothing; it" : "It"} goes together with ${fix.needs.join(" and ")}.`);
  if (fix.instead.length) notes.push(`Alternatively, ${fix.instead[0]}.`);
  return element("li", { class: "entry" },
    element("label", { class: "flip", for: id }, flip, element("span", { class: "knob", "aria-hidden": "true" }), element("span", { class: "number", text: String(fix.number + 1) })),
    element("div", { class: "what" },
      element("p", { class: "name" }, element("label", { for: id, text: fix.fix }), place ? leading(fix.place) : "", place),
      element("p", { class: "saved" }, element("span", { class: "gain", text: fix.prediction }), element("span", { class: "faint", text: ` ${fix.iterations}` })),
      where?.source ? element("code", { class: "own", text: where.source }) : null,
      element("details", { open: fix.number === 0 },
        element("summary", { text: "How" }),
        ...fix.says.map((sentence) => element("p", { text: sentence })),
        fix.code ? element("pre", {}, element("code", { text: fix.code })) : null,
        ...notes.map((note) => element("p", { class: "faint", text: note })),
      ),
    ),
  );
}
