// Builds the page into the Python package, or into the folder given; with --tests, the tests into build/tests.
import { copyFile, mkdir, readdir } from "node:fs/promises";
import { fileURLToPath } from "node:url";
import { join } from "node:path";
import { build } from "esbuild";

const here = fileURLToPath(new URL(".", import.meta.url));
const shared = { bundle: true, format: "esm", target: "es2022", charset: "utf8", logLevel: "warning" };
const [argument] = process.argv.slice(2);

if (argument === "--tests") {
  const names = (await readdir(join(here, "test"))).filter((name) => name.endsWith(".test.ts"));
  const entryPoints = names.map((name) => join(here, "test", name));
  await build({ ...shared, platform: "node", entryPoints, outdir: join(here, "build/tests"), outExtension: { ".js": ".mjs" } });
} else {
  const out = argument ?? join(here, "../src/draftloop/server/page");
  await mkdir(out, { recursive: true });
  await build({
    ...shared,
    absWorkingDir: here, // names of sources in the output are relative to it
    entryPoints: { page: "src/main.ts" },
    outdir: out,
  });
  for (const name of ["index.html", "page.css", "icon.svg"]) await copyFile(join(here, "src", name), join(out, name));
}
