// The time of one iteration: bars that sum to it.

import { element, section } from "../element";
import { term } from "../glossary";
import { HATCHES } from "../timeline/paint";
import type { Analysis, Header } from "../run/run";
import { duration, share } from "../words";
import type { Choice } from "../choice";

/** What the GPU does while it is busy, by the names of the ledger. */
export const AT_WORK = ["computing", "copying", "collective"];

/** A square in a place's colour and pattern. */
export function swatch(place: string): HTMLElement {
  return element("span", { class: `swatch ${HATCHES[place] ?? ""}`, "aria-hidden": "true", look: { "--fill": `var(--${place})` } });
}

export function bar(parts: [place: string, time: number][], whole: number, names: (place: string) => string): HTMLElement {
  const made = element("div", { class: "bar", role: "img", "aria-label": parts.map(([place, time]) => `${names(place)} ${duration(time, whole)}, ${share(time, whole)}`).join("; ") });
  for (const [place, time] of parts) {
    const wide = (100 * time) / whole;
    made.append(
      element("span", {
        class: `part ${HATCHES[place] ?? ""}`,
        "data-says": `${names(place)}: ${duration(time, whole)}, ${share(time, whole)}`,
        look: { "--fill": `var(--${place})`, "flex-basis": `${wide}%` },
      }, wide > 7 ? element("span", { class: `label on-${place}`, text: share(time, whole) }) : null),
    );
  }
  return made;
}

/** A bar with its name and its sum, as long as it is beside the longest. */
export function barRow(name: string, drawn: HTMLElement, sum: number, longest: number): HTMLElement {
  drawn.style.setProperty("width", `${(100 * sum) / longest}%`);
  return element("div", { class: "bar-row" }, element("span", { class: "bar-name", text: name }), element("div", { class: "bar-room" }, drawn), element("span", { class: "figure", text: duration(sum, longest) }));
}

export function ledgerSection(header: Header, analysis: Analysis, choice: Choice | null): HTMLElement {
  const name = (place: string) => header.looks[place]?.name ?? place;
  const sentence = (place: string) => header.looks[place]?.sentence ?? "";
  const table = element("table", { class: "ledger" });
  for (const [place, time] of analysis.ledger) {
    const cause = !AT_WORK.includes(place);
    const label = cause && choice
      ? element("button", { class: "place", type: "button", text: name(place), "data-says": sentence(place), on: { click: () => choice.cause(place) } })
      : element("span", { text: name(place), "data-says": sentence(place), tabindex: "0" });
    table.append(
      element("tr", {},
        element("td", {}, swatch(place)),
        element("th", { scope: "row" }, label),
        element("td", { class: "figure", text: duration(time, analysis.step) }),
        element("td", { class: "figure", text: share(time, analysis.step) }),
        element("td", { class: "faint", text: sentence(place) }),
      ),
    );
  }
  const bars = element("div", { class: "bars" });
  const then = element("div", { hidden: true });
  bars.append(barRow("now", bar(analysis.ledger, analysis.step, name), analysis.step, analysis.step), then);
  choice?.onFixes((view) => {
    then.hidden = !view.fixed.length || !view.busy;
    if (then.hidden || !view.busy) return;
    const { computing, copying, wire, waiting } = view.busy;
    const parts = ([["computing", computing], ["copying", copying], ["collective", wire], ["waiting", waiting]] as [string, number][]).filter(([, time]) => time > 0);
    const drawn = bar(parts, view.step, (place) => (place === "waiting" ? "idle" : name(place)));
    then.replaceChildren(barRow(`with fix ${view.fixed.map((fix) => fix + 1).join(", ")}`, drawn, view.step, analysis.step));
  });
  const title = analysis.script ? "Time of the script" : "Time of one iteration";
  const made = section("ledger", title, "", bars, table);
  made.querySelector("header")!.append(element("p", { class: "lead" }, "Solid: the GPU is busy. Hatched: it is idle, by ", term("cause"), "."));
  return made;
}
