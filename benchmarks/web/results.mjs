/** What a run found: times per round become medians and ratios; the file is whole at any time. */
import { renameSync, writeFileSync } from "node:fs";

const median = (list) => {
  const sorted = list.toSorted((a, b) => a - b);
  return (sorted[(sorted.length - 1) >> 1] + sorted[sorted.length >> 1]) / 2;
};
const quantile = (list, q) => list.toSorted((a, b) => a - b)[Math.floor(q * (list.length - 1))];

/** Adds medians and ratios to the rows of a group; the first row is ours. */
export function summarize({ rows }) {
  const [ours] = rows;
  for (const row of rows) {
    if (row.failed || !row.times.length) continue;
    // A slow system is left out of some rounds: a ratio is of rounds that both have.
    const both = row.times.flatMap((t) => ours.times?.filter((o) => o.round === t.round).map((o) => [t, o]) ?? []);
    const ms = row.times.map((t) => t.ms);
    Object.assign(row, { rounds: row.times.length, ms: median(ms), best: Math.min(...ms), cpu: median(row.times.map((t) => t.cpu)) });
    if (!both.length) continue;
    const ratios = both.map(([t, o]) => t.ms / o.ms);
    Object.assign(row, {
      ratio: median(ratios), low: quantile(ratios, 0.25), high: quantile(ratios, 0.75),
      cpuRatio: median(both.map(([t, o]) => t.cpu / o.cpu)),
      bestRatio: Math.min(...both.map(([t]) => t.ms)) / Math.min(...both.map(([, o]) => o.ms)),
    });
  }
}

/** Writes the file beside and renames it: a run that is ended meanwhile leaves the last round's. */
export function save(path, results) {
  for (const group of results.groups) summarize(group);
  writeFileSync(`${path}.part`, `${JSON.stringify(results, null, 1)}\n`);
  renameSync(`${path}.part`, path);
}

/** Gives a line per system. */
export const said = ({ rows }) => rows.map((r) => r.failed
  ? `${r.name}: ${r.failed}`
  : `${r.name.padEnd(34)} ${r.ms.toFixed(2)} ms, their time / ours ${r.ratio?.toFixed(2)} (best against best ${r.bestRatio?.toFixed(2)}, ` +
    `by processor time ${r.cpuRatio?.toFixed(2)}), ${r.rounds} rounds, ready after ${(r.opened / 1000).toFixed(0)} s`);
