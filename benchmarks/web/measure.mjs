/** Times the systems of one group: a model, an optimizer, a device. */
const TOLERANCE = 2e-3;
/** Losses are compared for at most this many batches and this many ms, but for at least two batches. */
const CHECKED = 16;
const CHECK_MS = 8000;
/** What a system trains in one round takes about this long, in ms, and never less than one call. */
const ROUND_MS = 150;
/** A system whose round takes longer than this, in ms, is timed in only this many rounds. */
const LONG_MS = 4000;
const LONG_ROUNDS = 2;

/** Opens a system and compares its first losses; throws where they are wrong. */
async function checked({ open, train }, system, { model, optimizer, device }) {
  const began = performance.now();
  const page = await open(system, { model, optimizer });
  try {
    const whole = system.together ?? 1;
    const losses = [];
    let last;
    do {
      last = await train(page, whole);
      losses.push(...last.losses);
    } while (losses.length < CHECKED && (losses.length < 2 || performance.now() - began < CHECK_MS));
    const off = Math.max(...losses.map((loss, i) => Math.abs(loss - last.wanted[i])));
    if (!(off < TOLERANCE)) throw new Error(`wrong: a loss is off by ${off.toExponential(1)}`);
    // Until the engine has compiled the hot code for good, and to learn how long a step takes.
    const until = performance.now() + (system.warm ?? (device === "webgpu" ? 0 : 1000));
    while (performance.now() < until && whole * last.ms < 1000) last = await train(page, whole);
    const steps = whole * Math.max(1, Math.round(ROUND_MS / last.ms / whole));
    return { page, facts: { steps, off, checked: losses.length, dispatches: last.dispatches, long: steps * last.ms > LONG_MS, opened: Math.round(performance.now() - began) } };
  } catch (error) {
    await page.close();
    throw error;
  }
}

/** Notes why a system does not train; a run that is being ended says nothing about systems. */
function failedIn(place, row, error) {
  if (place.alive?.() === false) throw error;
  Object.assign(row, { failed: reason(error), times: [] });
}

const reason = (error) => error.message.split("\n")[0].replace("page.evaluate: ", "").slice(0, 300);

/**
 * Times what is missing of a group, adds it there and calls `keep` after each round. `place` has the
 * `systems`, how one is opened in a page or process (`open`) and trains there (`train`), whether they still can
 * (`alive`), and whether all may be opened at once (`atOnce`); they are timed one after the other.
 */
export async function measure({ place, group, rounds, keep }) {
  const pages = new Map();
  const start = async (system) => {
    let row = group.rows.find((r) => r.name === system.name);
    if (!row) group.rows.push((row = { name: system.name, times: [] }));
    if (row.long && row.times.length >= LONG_ROUNDS) return;
    delete row.failed;
    try {
      const { page, facts } = await checked(place, system, group);
      pages.set(row, page);
      Object.assign(row, facts);
    } catch (error) {
      failedIn(place, row, error);
    }
  };
  const systems = place.systems(group.model, group.device);
  if (place.atOnce) await Promise.all(systems.map(start));
  else for (const system of systems) await start(system);
  while (group.done < rounds) {
    const order = [...pages.keys()].map((row) => [Math.random(), row]).sort((a, b) => a[0] - b[0]);
    for (const [, row] of order) {
      if (row.failed || (row.long && row.times.length >= LONG_ROUNDS)) continue;
      try {
        const { ms, cpu } = await place.train(pages.get(row), row.steps);
        row.times.push({ round: group.done, ms, cpu });
      } catch (error) {
        failedIn(place, row, error);
      }
    }
    group.done++;
    keep();
  }
  for (const page of pages.values()) await page.close();
}
