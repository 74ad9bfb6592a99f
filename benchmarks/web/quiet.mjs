/** Whether the machine has nothing else to do. */
import { cpus } from "node:os";
import { setTimeout as sleep } from "node:timers/promises";

/** Part of all processors' time that may be used by others. */
const ALLOWED = 0.15;

const ticks = () => {
  const all = cpus().map(({ times }) => times);
  const sum = (of) => all.reduce((total, times) => total + of(times), 0);
  return { idle: sum((t) => t.idle), whole: sum((t) => t.user + t.nice + t.sys + t.irq + t.idle) };
};

/** Gives the part of all processors' time that was used, while we only waited. */
export async function busy(ms = 2000) {
  const before = ticks();
  await sleep(ms);
  const after = ticks();
  return 1 - (after.idle - before.idle) / Math.max(1, after.whole - before.whole);
}

/** Waits until the machine is quiet; says whether it became so in time. */
export async function quiet(limit = 120_000) {
  const until = performance.now() + limit;
  for (;;) {
    const part = await busy();
    if (part <= ALLOWED) return true;
    if (performance.now() > until) return false;
    console.log(`  others use ${Math.round(100 * part)} % of the processors: waiting`);
    await sleep(Math.min(10_000, limit / 10));
  }
}
