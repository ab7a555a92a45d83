// The page: reads the run that it carries and puts it together.

import { Choice } from "./choice";
import { element } from "./element";
import { bubble, term } from "./glossary";
import { busy } from "./run/busy";
import { apply, together } from "./run/edit";
import { steady } from "./run/replay";
import { load, type Analysis, type Moment, type Run } from "./run/run";
import { causesSection, notesSection } from "./sections/causes";
import { collectivesSection } from "./sections/collectives";
import { compareSection } from "./sections/compare";
import { copiesSection } from "./sections/copies";
import { ledgerSection } from "./sections/ledger";
import { memorySection } from "./sections/memory";
import { planSection } from "./sections/plan";
import { ranksSection } from "./sections/ranks";
import { SourcePanel } from "./sections/source";
import { treeSection } from "./sections/tree";
import { HATCHES } from "./timeline/paint";
import { TimelinePanel } from "./timeline/panel";
import { startTour } from "./tour";
import { leading } from "./words";

declare global {
  interface Window {
    /** For the tests, and for who wants to compute with the run in the browser's console. */
    keepbusy: { run: Run; choice: Choice | null; panel: TimelinePanel | null; hatches: typeof HATCHES; replayed(fixes: number[]): object };
  }
}

/** The verdict, in the words of the terminal; its fixes are the plan below. */
function headline(analysis: Analysis): HTMLElement {
  const largest = analysis.plan[analysis.largest];
  const fix = largest && element("p", { class: "big" }, largest.fix, largest.place ? leading(largest.place) : "", element("span", { class: "place", text: largest.place }));
  return element("section", { id: "headline", "aria-label": "The verdict" },
    element("p", { class: "facts-line", text: analysis.place ? `loop at ${analysis.place}` : analysis.header }),
    element("h1", { text: analysis.headline || analysis.statement }),
    analysis.headline ? fix : null,
    analysis.headline ? element("p", { text: analysis.statement }) : null,
    ...analysis.races.map((race) => element("p", { class: "race", text: `Data race: ${race}` })),
  );
}

function topBar(recolour: () => void): HTMLElement {
  const root = document.documentElement;
  const dark = (): boolean => (root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
  const flip = element("button", { type: "button", class: "quiet", on: {
    click: () => {
      root.dataset.theme = dark() ? "light" : "dark";
      flip.textContent = dark() ? "Light" : "Dark";
      recolour();
    },
  } });
  flip.textContent = dark() ? "Light" : "Dark";
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    flip.textContent = dark() ? "Light" : "Dark";
    recolour();
  });
  const links = [["plan", "Plan"], ["run", "Run"], ["timeline", "Timeline"], ["ledger", "Time"], ["causes", "Causes"]];
  return element("nav", { class: "top", "aria-label": "Page" },
    element("span", { class: "brand" }, element("span", { class: "mark", "aria-hidden": "true" }, element("i"), element("i"), element("i")), "keepbusy"),
    element("span", { class: "links" }, ...links.map(([id, name]) => element("button", { type: "button", class: "quiet", text: name, "data-to": id, on: { click: () => document.getElementById(id)?.scrollIntoView({ behavior: "smooth" }) } }))),
    element("span", { class: "grow" }),
    element("button", { type: "button", class: "quiet", text: "Tour", on: { click: startTour } }),
    flip,
  );
}

/** One run, or two to be compared; which of them the page is about, and which of its loops. */
interface Shown {
  runs: Run[];
  side: number;
  index: number;
}

const SIDES = ["before", "after"];
const nameOf = (side: number, { header }: Run): string => `${SIDES[side]}${header.source ? `, ${header.source}` : ""}`;

/** The texts come first; the timeline, which may be a million spans, once it is read. */
async function show(shown: Shown, page: HTMLElement): Promise<void> {
  const { runs, side, index } = shown;
  const run = runs[side];
  const { header } = run;
  const analysis = header.analyses[index];
  const drawn = run.drawn.includes(index);
  const put = (choice: Choice | null, timeline: HTMLElement): void => {
    const sections = [
      runs[0].header.compared ? compareSection(runs.map((one) => one.header), runs[0].header.compared) : null,
      choices(shown, page),
      headline(analysis),
      planSection(analysis, choice),
      treeSection(header, choice, (other) => void show({ ...shown, index: other }, page)),
      timeline,
      ledgerSection(header, analysis, choice),
      causesSection(header, analysis, choice),
      choice && ranksSection(header, choice),
      choice && collectivesSection(choice),
      choice && memorySection(choice),
      choice && copiesSection(header, choice),
      notesSection(analysis),
      element("footer", {}, element("p", { class: "faint" }, `Written by keepbusy ${header.version}. Predictions are `, term("replay", "replays"), " of the recorded run.")),
    ];
    page.replaceChildren(...sections.filter((one) => one !== null));
    for (const link of document.querySelectorAll<HTMLElement>("nav [data-to]")) link.hidden = !document.getElementById(link.dataset.to ?? "");
  };
  window.keepbusy = { run, choice: null, panel: null, hatches: HATCHES, replayed: () => ({}) };
  put(null, element("p", { class: "faint", text: drawn ? "The timeline is being read." : "This page has no timeline, only the analysis." }));
  if (!drawn) return;
  await new Promise((shown) => setTimeout(shown, 30));
  const choice = new Choice(await run.moment(index));
  const source = new SourcePanel(header, choice);
  const beside = index === 0 ? runs[1 - side] : undefined;
  const other = beside?.drawn.includes(0) ? { name: nameOf(1 - side, beside), scene: new Choice(await beside.moment(0)).now } : null;
  const panel = new TimelinePanel(header, choice, source.element, source.hasText, other);
  panel.onPlace = (place) => source.show(place.file, place.line);
  put(choice, panel.element);
  window.keepbusy = { run, choice, panel, hatches: HATCHES, replayed: (fixes) => plainNumbers(choice.moment, fixes) };
  choice.fixes([]);
  panel.resize();
  panel.oneIteration();
  source.showWorst();
}

/** A replay with these fixes as it is, its rows by their number before the fixes. */
function plainNumbers(moment: Moment, fixes: number[]): object {
  const edits = fixes.map((fix) => moment.fixes[fix]!);
  const edited = apply(moment.timeline, together(edits, moment.timeline.rows));
  const done = steady(edited.timeline);
  return {
    row: Array.from(edited.row),
    start: Array.from(done.start),
    end: Array.from(done.end),
    pace: done.pace,
    busy: busy(edited.timeline, done, moment.ratio),
  };
}

/** Which run, and which of its loops that were looked at. */
function choices(shown: Shown, page: HTMLElement): HTMLElement | null {
  const { runs, side, index } = shown;
  const { analyses } = runs[side].header;
  const button = (text: string, to: Partial<Shown>, pressed: boolean) =>
    element("button", { type: "button", "aria-pressed": String(pressed), text, on: { click: () => void show({ ...shown, ...to }, page) } });
  const sides = runs.length > 1 ? runs.map((run, at) => button(nameOf(at, run), { side: at, index: 0 }, at === side)) : [];
  const loops = analyses.length > 1 ? analyses.map(({ place }, at) => button(place ? `loop at ${place}` : "the steps", { index: at }, at === index)) : [];
  return sides.length + loops.length ? element("div", { class: "loops", role: "group", "aria-label": "Run and loop" }, ...sides, ...loops) : null;
}

async function main(): Promise<void> {
  const page = document.getElementById("page")!;
  const runs: Run[] = [];
  for (const held of document.querySelectorAll('script[type="application/octet-stream"]')) {
    runs.push(await load(held.textContent ?? ""));
    held.remove();
  }
  document.title = `${runs.map(({ header }) => header.source || "a run").join(" → ")} · keepbusy`;
  const recolour = (): void => {
    window.keepbusy?.panel?.recolour();
    document.dispatchEvent(new Event("recolour"));
  };
  document.body.prepend(topBar(recolour));
  document.body.append(bubble());
  await show({ runs, side: 0, index: 0 }, page);
  page.removeAttribute("aria-busy");
}

main().catch((error: unknown) => {
  const page = document.getElementById("page")!;
  page.replaceChildren(element("p", { class: "fault", text: `This page cannot show its run: ${String(error)}. A browser of the last three years can; keepbusy explain shows it as text.` }));
  page.removeAttribute("aria-busy");
  throw error;
});
