// Bundles the page into the Python package. `node build.mjs FOLDER` writes elsewhere, for the test of the bundle.
import { build } from "esbuild";
import { fileURLToPath } from "node:url";

const here = fileURLToPath(new URL(".", import.meta.url));
const outdir = process.argv[2] ?? `${here}../src/keepbusy/report/page`;
const options = { bundle: true, minify: true, legalComments: "none", charset: "ascii", target: "es2022", outdir };

await build({ ...options, entryPoints: { page: `${here}src/page.ts` }, format: "iife" });
await build({ ...options, entryPoints: { page: `${here}src/page.css` } });
