import { readdirSync, readFileSync, statSync } from "node:fs";
import { InferenceSession } from "onnxruntime-node";
import { afterEach, expect, test, vi } from "vitest";
import { readCheckpoint, Trainer } from "../src/index.js";
import { generate } from "../src/text/index.js";
import { bytes, FIXTURES } from "./support.js";

const FOLDER = `${FIXTURES}/lm`;
const { prompt } = JSON.parse(readFileSync(`${FOLDER}/expected.json`, "utf8")) as { prompt: number[] };
type Feeds = Record<string, unknown>;

/** A session that was created, with its feeds and results. */
interface SessionRecord {
  readonly model: Uint8Array;
  readonly external: readonly Uint8Array[];
  readonly runs: Feeds[];
  results: Feeds[];
  open: boolean;
}

afterEach(() => vi.restoreAllMocks());

/** Records the sessions that are created from now on. */
function watch(): SessionRecord[] {
  const sessions: SessionRecord[] = [];
  const create = InferenceSession.create.bind(InferenceSession) as (m: Uint8Array, o: InferenceSession.SessionOptions) => Promise<InferenceSession>;
  vi.spyOn(InferenceSession, "create").mockImplementation((async (model: Uint8Array, options: InferenceSession.SessionOptions) => {
    const session = await create(model, options);
    const external = (options.externalData ?? []).map((e) => (e as { data: Uint8Array }).data);
    const opened: SessionRecord = { model, external, runs: [], results: [], open: true };
    const [run, release] = [session.run.bind(session), session.release.bind(session)];
    session.run = (async (feeds: never) => {
      opened.runs.push(feeds);
      const results = await run(feeds);
      opened.results.push(results as unknown as Feeds);
      return results;
    }) as never;
    session.release = async () => {
      opened.open = false;
      await release();
    };
    sessions.push(opened);
    return session;
  }) as never);
  return sessions;
}

async function write(trainer: Trainer, keep?: boolean): Promise<void> {
  for await (const _ of generate(trainer, prompt, { maxTokens: 2, ...(keep === undefined ? {} : { keep }) }));
}

test("generation uses a second session that shares the weights file and the adapter tensors", async () => {
  const sessions = watch();
  const names = readdirSync(FOLDER).filter((name) => /\.(onnx|bin)$|^checkpoint$|^manifest/.test(name));
  const artifacts = new Map(names.map((name) => [name, bytes(`${FOLDER}/${name}`)]));
  const trainer = await Trainer.create({ artifacts, device: "node", threads: 1 });
  const { tensors } = await readCheckpoint(bytes(`${FOLDER}/batches.safetensors`));
  await trainer.step(Object.fromEntries(["input_ids", "attention_mask", "labels"].map((n) => [n, tensors.get(`0/${n}`)!])));
  await write(trainer, true);
  expect(sessions.length).toBe(2);
  const [training, sampling] = sessions as [SessionRecord, SessionRecord];
  // The frozen weights: both sessions get the same bytes, and neither model file contains them.
  const size = statSync(`${FOLDER}/weights.bin`).size;
  expect(size).toBeGreaterThan(0);
  for (const { external } of sessions) {
    expect(external.length).toBe(1);
    expect(external[0] === artifacts.get("weights.bin"), "the same buffer").toBe(true);
  }
  expect(sampling.model.length).toBeLessThan(size);
  // The adapters: outputs of the step are fed to the other session without a copy.
  const trained = new Set(Object.values(training.results.at(-1)!));
  for (const { name } of trainer.parameters) expect(trained.has(sampling.runs[0]![name]), name).toBe(true);
  await trainer.dispose();
  expect(sessions.map((s) => s.open)).toEqual([false, false]);
});

test("large weights are in memory once: the training session is released during generation and training continues unchanged", async () => {
  const sessions = watch();
  const trainer = await Trainer.create({ artifacts: FOLDER, device: "node", threads: 1 });
  const { tensors } = await readCheckpoint(bytes(`${FOLDER}/batches.safetensors`));
  const batch = Object.fromEntries(["input_ids", "attention_mask", "labels"].map((n) => [n, tensors.get(`0/${n}`)!]));
  const open = () => sessions.map((s) => s.open);
  const losses = [(await trainer.step(batch)).loss];
  expect(open()).toEqual([true]);
  for await (const _ of generate(trainer, prompt, { maxTokens: 2, keep: false })) expect(open()).toEqual([false, true]);
  expect(open()).toEqual([false, false]);
  losses.push((await trainer.step(batch)).loss);
  expect(open()).toEqual([false, false, true]);
  await write(trainer); // small weights: both sessions stay open
  expect(open()).toEqual([false, false, true, true]);
  await write(trainer);
  expect(open()).toEqual([false, false, true, true]);
  // Pretend that the weights are large.
  Object.assign(trainer.manifest.options["memory"] as object, { constants: 32e6 });
  await write(trainer);
  expect(open()).toEqual([false, false, false, false]);
  losses.push((await trainer.step(batch)).loss);
  await trainer.dispose();
  const undisturbed = await Trainer.create({ artifacts: FOLDER, device: "node", threads: 1 });
  for (const loss of losses) expect((await undisturbed.step(batch)).loss).toBe(loss);
  await undisturbed.dispose();
});
