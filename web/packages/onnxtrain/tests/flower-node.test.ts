import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { afterEach, beforeEach, expect, test, vi } from "vitest";
import type { HostTensor } from "../src/dtypes.js";
import { fileNodeStore, FlowerNode, memoryNodeStore, newKey, type FlowerNodeOptions, type NodeStore } from "../src/flower/index.js";
import type { Content } from "../src/flower/messages.js";
import { Trainer } from "../src/index.js";
import { FakeSuperLink } from "./fake-superlink.js";
import { distance, fixture, type Fixture } from "./support.js";

/** How long anything may take, in ms: only what hangs takes longer, however busy the machine is. */
const PATIENCE = 600_000;
let link: FakeSuperLink;
let url: string;
let f: Fixture;
let folder: string;
const running: FlowerNode[] = [];
const trainers: Trainer[] = [];

beforeEach(async () => {
  link = new FakeSuperLink();
  url = await link.start();
  f = await fixture("mlp-wasm");
  folder = mkdtempSync(join(tmpdir(), "node-"));
});
afterEach(async () => {
  for (const node of running.splice(0)) await node.leave();
  for (const trainer of trainers.splice(0)) await trainer.dispose();
  link.stop();
  rmSync(folder, { recursive: true, force: true });
});

const open = async (): Promise<Trainer> => {
  const trainer = await Trainer.create({ artifacts: f.folder });
  trainers.push(trainer);
  return trainer;
};

async function join_(options: Partial<FlowerNodeOptions> = {}): Promise<FlowerNode> {
  const trainer = options.trainer ?? (await open());
  const node = new FlowerNode(url, { dataset: () => f.batches, poll: 20, ...options, trainer });
  running.push(node);
  return await node.join();
}

async function weights(trainer: Trainer): Promise<Record<string, HostTensor>> {
  const found: Record<string, HostTensor> = {};
  for (const { name } of trainer.parameters) found[name] = await trainer.getParameter(name);
  return found;
}

const ask = (arrays: Record<string, HostTensor>, config = {}): Content => ({
  arrays: { arrays }, config: { config: { "server-round": 1n, lr: 0.01, ...config } },
});
const arrived = (n: number) => vi.waitFor(() => expect(link.replies).toHaveLength(n), { timeout: PATIENCE, interval: 20 });
const arraysOf = (n: number) => (link.replies[n]!.content["arrays"] as { arrays: Record<string, HostTensor> }).arrays;
const metricsOf = (n: number) => (link.replies[n]!.content["metrics"] as { metrics: Record<string, number | bigint> }).metrics;
const flat = (all: Record<string, HostTensor>): number[] => Object.values(all).flatMap((t) => [...(t.data as Float32Array)]);

test("it trains and evaluates what it is sent, and loads equal weights once", async () => {
  const reference = await open();
  const start = await weights(reference);
  const node = await join_();
  await link.send("train", ask(start));
  await arrived(1);
  reference.learningRate = 0.01;
  for (const batch of f.batches) await reference.step(batch);
  expect(distance(flat(arraysOf(0)), flat(await weights(reference)))).toBeLessThan(1e-6);
  expect(metricsOf(0)).toMatchObject({ "num-examples": BigInt(8 * f.batches.length), steps: BigInt(f.batches.length) });
  const before = link.pulled.length;
  await link.send("evaluate", ask(start));
  await arrived(2);
  // Only the message and its records are new, not the arrays.
  expect(link.pulled.length - before).toBeLessThan(5);
  expect(metricsOf(1)["loss"]).toBeGreaterThan(0);
  expect(node.traffic.calls["push-messages"]).toBe(2);
  expect(link.replies[0]!.metadata).toMatchObject({ from: node.id, to: 1n, type: "train" });
});

test("state of the optimizer goes, or stays", async () => {
  const reference = await open();
  const start = await weights(reference);
  await join_();
  for (const state of ["reset", "reset", "keep", "keep"]) await link.send("train", ask(start, { "optimizer-state": state }));
  await arrived(4);
  expect(flat(arraysOf(1))).toEqual(flat(arraysOf(0)));
  // The last message of these starts from the state that the one before it left.
  expect(distance(flat(arraysOf(3)), flat(arraysOf(0)))).toBeGreaterThan(1e-6);
});

test("weights of other artifacts, and what fails, are answered by an error", async () => {
  const start = await weights(await open());
  const { [Object.keys(start)[0]!]: first, ...rest } = start;
  await join_();
  await link.send("train", ask(rest));
  await link.send("train", ask({ ...start, evil: first! }));
  await link.send("train", ask(start, { "proximal-mu": 0.5 }));
  await link.send("dance", ask(start));
  await arrived(4);
  const reasons = link.replies.map((r) => r.failure);
  expect(reasons[0]).toContain(`'${Object.keys(start)[0]}' is missing`);
  expect(reasons[1]).toContain("'evil' is unknown here");
  expect(reasons[2]).toContain("proximal term of 0.5, these artifacts have 0");
  expect(reasons[3]).toContain("type dance");
});

test("a node that was killed in a round goes on where it was, with its key and number", async () => {
  const start = await weights(await open());
  const store = fileNodeStore(folder);
  const killed = killing(store, "reply"); // dies when the reply is to be stored
  const first = await join_({ store: killed });
  await link.send("train", ask(start));
  await vi.waitFor(() => expect(killed.dead).toBe(true), { timeout: PATIENCE });
  expect(link.replies).toHaveLength(0);
  const again = await join_({ store });
  await arrived(1);
  expect(again.id).toBe(first.id);
  expect(link.nodes.size).toBe(1);
  expect(link.replies[0]!.failure).toBe("");
  running.splice(running.indexOf(first), 1);
});

test("a reply that was not sent before a reload is sent after it, not computed anew", async () => {
  const start = await weights(await open());
  const store = memoryNodeStore();
  link.broken.push(...Array<string>(100).fill("push-messages")); // it is tried again and again
  const first = await join_({ store });
  await link.send("train", ask(start));
  await vi.waitFor(() => expect(link.calls).toContain("push-messages"), { timeout: PATIENCE, interval: 5 });
  await first.leave();
  expect(link.replies).toHaveLength(0);
  const before = link.pulled.length;
  link.broken.length = 0;
  await join_({ store });
  await arrived(1);
  expect(link.pulled.length).toBe(before);
  expect(link.replies[0]!.failure).toBe("");
});

test("connections that break are tried again", async () => {
  const start = await weights(await open());
  link.broken.push("register-node", "pull-object", "push-object");
  await join_();
  await link.send("train", ask(start));
  await arrived(1);
  expect(link.broken).toEqual([]);
});

test("a clock that is off is set by the server's", async () => {
  link.clock = 900;
  const node = await join_();
  expect(node.id).toBeDefined();
});

test("a server that forgot everybody is joined anew", async () => {
  const node = await join_();
  const { id } = node;
  link.nodes.clear();
  link.online.clear();
  await vi.waitFor(() => expect(link.nodes.size).toBe(1), { timeout: PATIENCE });
  await vi.waitFor(() => expect(node.id).not.toBe(id), { timeout: PATIENCE });
});

test("a given key is used, and its number comes back with it", async () => {
  const key = await newKey();
  const node = await join_({ key });
  await node.leave();
  expect(link.online.size).toBe(0);
  const again = await join_({ key });
  expect(again.id).toBe(node.id);
});

test("nothing is confirmed before it is stored", async () => {
  const start = await weights(await open());
  const inner = memoryNodeStore();
  // Into the list of calls, so that their order is seen.
  const store: NodeStore = { ...inner, put: (name, value) => (link.calls.push(`put ${name.split("/").pop()}`), inner.put(name, value)) };
  await join_({ store });
  await link.send("train", ask(start));
  await arrived(1);
  const at = (name: string) => link.calls.indexOf(name);
  const order = ["put pending", "pull-object", "put reply", "confirm-message-received", "push-messages"];
  expect(order.every((name) => at(name) >= 0)).toBe(true);
  expect([...order].sort((a, b) => at(a) - at(b))).toEqual(order);
});

test("a hidden page asks for no work until it is shown, if it is to pause", async () => {
  const start = await weights(await open());
  const page = { hidden: true };
  vi.stubGlobal("document", page);
  try {
    await join_({ pauseWhenHidden: true });
    await link.send("train", ask(start));
    await new Promise((resolve) => setTimeout(resolve, 300));
    expect(link.calls).not.toContain("pull-messages");
    page.hidden = false;
    await arrived(1);
    expect(link.replies[0]!.failure).toBe("");
  } finally {
    vi.unstubAllGlobals();
  }
});

test("a hidden page works on, unless it is to pause", async () => {
  vi.stubGlobal("document", { hidden: true });
  try {
    await join_();
    await vi.waitFor(() => expect(link.calls).toContain("pull-messages"), { timeout: PATIENCE });
  } finally {
    vi.unstubAllGlobals();
  }
});

/** Returns a store that fails from a certain write on, as a program that is killed does. */
function killing(store: NodeStore, word: string): NodeStore & { dead: boolean } {
  const own = {
    dead: false,
    ...(store.text ? { text: true } : {}),
    get: (name: string) => (own.dead ? new Promise<unknown>(() => undefined) : store.get(name)),
    put: async (name: string, value: unknown) => {
      if (name.endsWith(`/${word}`)) own.dead = true;
      return own.dead ? await new Promise<void>(() => undefined) : await store.put(name, value);
    },
    remove: (name: string) => (own.dead ? new Promise<void>(() => undefined) : store.remove(name)),
  };
  return own;
}
