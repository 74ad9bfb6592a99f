/** Several files at once, of which some may be of no use. */

/** Does something with each file; one that fails does not keep the others from being taken. Gives what to say, and throws it if any failed. */
export async function eachFile(files: readonly File[], name: string, take: (file: File) => Promise<void>): Promise<string> {
  const reasons: string[] = [];
  for (const file of files) await take(file).catch((error: Error) => reasons.push(error.message));
  const taken = files.length - reasons.length;
  const said = `${taken} ${taken === 1 ? "picture" : "pictures"} more for ${name}.`;
  if (reasons.length) throw new Error(taken ? `${reasons.join("; ")}. ${said}` : reasons.join("; "));
  return said;
}
