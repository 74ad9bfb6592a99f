/** Parts of the site that do not need a browser. */
import { expect, test, vi } from "vitest";
import { eachFile } from "../../../site/src/teach/classes.js";
import { Vocabulary, sampleId, countOf, LENGTH, randomSequences } from "../../../site/src/write/characters.js";

const file = (name: string) => new File(["x"], name);

test("a file that is not an image does not prevent the others from being added", async () => {
  const taken: string[] = [];
  const take = async ({ name }: File) => {
    if (name.endsWith(".txt")) throw new Error(`${name} is not an image`);
    taken.push(name);
  };
  expect(await eachFile([file("a.png")], "Disc", take)).toBe("Added 1 image to Disc.");
  await expect(eachFile([file("b.txt"), file("c.png"), file("d.png")], "Disc", take)).rejects.toThrow("b.txt is not an image. Added 2 images to Disc.");
  await expect(eachFile([file("e.txt")], "Disc", take)).rejects.toThrow(/^e.txt is not an image$/);
  expect(taken).toEqual(["a.png", "c.png", "d.png"]);
});

test.each(["नमस्ते दुनिया ", "你好世界", "👩🏽‍🚀🚀 ok ", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢"])("text in any script survives encoding and decoding: %s", (words) => {
  const text = words.repeat(20);
  const vocabulary = new Vocabulary(text);
  const numbers = vocabulary.encode(text);
  expect(countOf(text)).toBe(numbers.length);
  expect(numbers.map((n) => vocabulary.decode(n)).join("")).toBe(text);
  const { ids, labels } = randomSequences(numbers, 3);
  expect([ids.length, [...ids]]).toEqual([3 * LENGTH, [...labels]]);
});

test("sampling works for a text with a single character", () => {
  const { characters } = new Vocabulary("a".repeat(80));
  expect(characters.length).toBe(2);
  expect([0, 0.5, 1].map((random) => sampleId([9, -3, 7], 2, 0.7, random))).toEqual([1, 1, 1]);
});

test("every page links documentation and source", async () => {
  const footer = async (variables: Record<string, string | undefined>): Promise<string> => {
    for (const [name, value] of Object.entries(variables)) vi.stubEnv(name, value);
    vi.resetModules();
    const { shell } = (await import("../../../site/shell.js" as string)) as { shell: () => { transformIndexHtml?: { handler?: (html: string, at: { path: string }) => string } }[] };
    const page = shell().flatMap((p) => p.transformIndexHtml?.handler?.("<html><head></head><body></body></html>", { path: "/draw/index.html" }) ?? [])[0]!;
    vi.unstubAllEnvs();
    return page.slice(page.indexOf("<footer"));
  };
  const known = await footer({ DOCS_URL: "../", SOURCE_URL: "https://example.org/source" });
  expect(known).toContain('<a href="../../">Documentation</a><a href="https://example.org/source">Source</a>');
  const none = { DOCS_URL: undefined, SOURCE_URL: undefined, GITHUB_SERVER_URL: undefined, GITHUB_REPOSITORY: undefined };
  // Hidden until the documentation contains the site: docs/conf.py shows it.
  expect(await footer(none)).toContain('<a href="../../" hidden>Documentation</a><button id="share-page"');
  expect(await footer({ ...none, GITHUB_SERVER_URL: "https://example.org", GITHUB_REPOSITORY: "a/b" })).toContain('<a href="https://example.org/a/b">Source</a>');
});
