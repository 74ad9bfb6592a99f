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

/** Timeout in ms, long enough for a busy machine: only a hanging test reaches it. */
const TIMEOUT = 600_000;
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

async function joinNode(options: Partial<FlowerNodeOptions> = {}): Promise<FlowerNode> {
  const trainer = options.trainer ?? (await open());
  const node = new FlowerNode(url, { dataset: () => f.batches, poll: 20, ...options, trainer });
  running.push(node);
  return await node.join();
}

async function weights(trainer: Trainer): Promise<Record<string, HostTensor>> {
  const result: Record<string, HostTensor> = {};
  for (const { name } of trainer.parameters) result[name] = await trainer.getParameter(name);
  return result;
}

const message = (arrays: Record<string, HostTensor>, config = {}): Content => ({
  arrays: { arrays }, config: { config: { "server-round": 1n, lr: 0.01, ...config } },
});
const arrived = (n: number) => vi.waitFor(() => expect(link.replies).toHaveLength(n), { timeout: TIMEOUT, interval: 20 });
const arraysOf = (n: number) => (link.replies[n]!.content["arrays"] as { arrays: Record<string, HostTensor> }).arrays;
const metricsOf = (n: number) => (link.replies[n]!.content["metrics"] as { metrics: Record<string, number | bigint> }).metrics;
const flat = (all: Record<string, HostTensor>): number[] => Object.values(all).flatMap((t) => [...(t.data as Float32Array)]);

test("trains and evaluates, and downloads equal weights once", async () => {
  const reference = await open();
  const start = await weights(reference);
  const node = await joinNode();
  await link.send("train", message(start));
  await arrived(1);
  reference.learningRate = 0.01;
  for (const batch of f.batches) await reference.step(batch);
  expect(distance(flat(arraysOf(0)), flat(await weights(reference)))).toBeLessThan(1e-6);
  expect(metricsOf(0)).toMatchObject({ "num-examples": BigInt(8 * f.batches.length), steps: BigInt(f.batches.length) });
  const before = link.pulled.length;
  await link.send("evaluate", message(start));
  await arrived(2);
  // Only the message and its records are downloaded, not the arrays.
  expect(link.pulled.length - before).toBeLessThan(5);
  expect(metricsOf(1)["loss"]).toBeGreaterThan(0);
  expect(node.traffic.calls["push-messages"]).toBe(2);
  expect(link.replies[0]!.metadata).toMatchObject({ from: node.id, to: 1n, type: "train" });
});

test("optimizer-state resets or keeps the optimizer state", async () => {
  const reference = await open();
  const start = await weights(reference);
  await joinNode();
  for (const state of ["reset", "reset", "keep", "keep"]) await link.send("train", message(start, { "optimizer-state": state }));
  await arrived(4);
  expect(flat(arraysOf(1))).toEqual(flat(arraysOf(0)));
  // The last round starts with the state of the round before.
  expect(distance(flat(arraysOf(3)), flat(arraysOf(0)))).toBeGreaterThan(1e-6);
});

test("replies with an error to weights of other artifacts and unknown requests", async () => {
  const start = await weights(await open());
  const { [Object.keys(start)[0]!]: first, ...rest } = start;
  await joinNode();
  await link.send("train", message(rest));
  await link.send("train", message({ ...start, evil: first! }));
  await link.send("train", message(start, { "proximal-mu": 0.5 }));
  await link.send("dance", message(start));
  await arrived(4);
  const reasons = link.replies.map((r) => r.failure);
  expect(reasons[0]).toContain(`'${Object.keys(start)[0]}' is missing`);
  expect(reasons[1]).toContain("'evil' is unknown");
  expect(reasons[2]).toContain("proximal-mu to 0.5, but these artifacts were built with 0");
  expect(reasons[3]).toContain("unknown message type: dance");
});

test("a node that was killed during a round resumes it with the same key and id", async () => {
  const start = await weights(await open());
  const store = fileNodeStore(folder);
  const killed = killing(store, "reply"); // dies before the reply is stored
  const first = await joinNode({ store: killed });
  await link.send("train", message(start));
  await vi.waitFor(() => expect(killed.dead).toBe(true), { timeout: TIMEOUT });
  expect(link.replies).toHaveLength(0);
  const again = await joinNode({ store });
  await arrived(1);
  expect(again.id).toBe(first.id);
  expect(link.nodes.size).toBe(1);
  expect(link.replies[0]!.failure).toBe("");
  running.splice(running.indexOf(first), 1);
});

test("a reply that was not sent before a reload is sent afterwards without training again", async () => {
  const start = await weights(await open());
  const store = memoryNodeStore();
  link.broken.push(...Array<string>(100).fill("push-messages")); // every attempt fails
  const first = await joinNode({ store });
  await link.send("train", message(start));
  await vi.waitFor(() => expect(link.calls).toContain("push-messages"), { timeout: TIMEOUT, interval: 5 });
  await first.leave();
  expect(link.replies).toHaveLength(0);
  const before = link.pulled.length;
  link.broken.length = 0;
  await joinNode({ store });
  await arrived(1);
  expect(link.pulled.length).toBe(before);
  expect(link.replies[0]!.failure).toBe("");
});

test("retries broken connections", async () => {
  const start = await weights(await open());
  link.broken.push("register-node", "pull-object", "push-object");
  await joinNode();
  await link.send("train", message(start));
  await arrived(1);
  expect(link.broken).toEqual([]);
});

test("adjusts a wrong clock to the server's", async () => {
  link.clock = 900;
  const node = await joinNode();
  expect(node.id).toBeDefined();
});

test("joins again if the server lost its database", async () => {
  const node = await joinNode();
  const { id } = node;
  link.nodes.clear();
  link.online.clear();
  await vi.waitFor(() => expect(link.nodes.size).toBe(1), { timeout: TIMEOUT });
  await vi.waitFor(() => expect(node.id).not.toBe(id), { timeout: TIMEOUT });
});

test("uses a given key and gets its id back", async () => {
  const key = await newKey();
  const node = await joinNode({ key });
  await node.leave();
  expect(link.online.size).toBe(0);
  const again = await joinNode({ key });
  expect(again.id).toBe(node.id);
});

test("confirms messages only after storing them", async () => {
  const start = await weights(await open());
  const inner = memoryNodeStore();
  // Record writes in the list of calls, to check their order.
  const store: NodeStore = { ...inner, put: (name, value) => (link.calls.push(`put ${name.split("/").pop()}`), inner.put(name, value)) };
  await joinNode({ store });
  await link.send("train", message(start));
  await arrived(1);
  const at = (name: string) => link.calls.indexOf(name);
  const order = ["put pending", "pull-object", "put reply", "confirm-message-received", "push-messages"];
  expect(order.every((name) => at(name) >= 0)).toBe(true);
  expect([...order].sort((a, b) => at(a) - at(b))).toEqual(order);
});

test("pauseWhenHidden pauses in a hidden page", async () => {
  const start = await weights(await open());
  const page = { hidden: true };
  vi.stubGlobal("document", page);
  try {
    await joinNode({ pauseWhenHidden: true });
    await link.send("train", message(start));
    await new Promise((resolve) => setTimeout(resolve, 300));
    expect(link.calls).not.toContain("pull-messages");
    page.hidden = false;
    await arrived(1);
    expect(link.replies[0]!.failure).toBe("");
  } finally {
    vi.unstubAllGlobals();
  }
});

test("a hidden page continues without pauseWhenHidden", async () => {
  vi.stubGlobal("document", { hidden: true });
  try {
    await joinNode();
    await vi.waitFor(() => expect(link.calls).toContain("pull-messages"), { timeout: TIMEOUT });
  } finally {
    vi.unstubAllGlobals();
  }
});

/** Returns a store that stops responding at a given write, like a killed process. */
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
