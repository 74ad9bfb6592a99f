/** Files that a person drops or chooses. */

/** Gives all files of what was dropped, those of folders too. */
export async function dropped(transfer: DataTransfer): Promise<File[]> {
  const entries = [...transfer.items].map((item) => item.webkitGetAsEntry()).filter((entry) => entry !== null);
  const read = async (entry: FileSystemEntry): Promise<File[]> => {
    if (entry.isFile) return [await new Promise<File>((resolve, reject) => (entry as FileSystemFileEntry).file(resolve, reject))];
    const reader = (entry as FileSystemDirectoryEntry).createReader();
    const inner: FileSystemEntry[] = [];
    // Browsers give a hundred at a time.
    for (;;) {
      const some = await new Promise<FileSystemEntry[]>((resolve, reject) => reader.readEntries(resolve, reject));
      if (!some.length) break;
      inner.push(...some);
    }
    return (await Promise.all(inner.map(read))).flat();
  };
  return (await Promise.all(entries.map(read))).flat();
}

/** Makes an element a place to drop files on. */
export function dropZone(zone: HTMLElement, got: (files: Promise<File[]>) => void): void {
  zone.ondragover = (event) => {
    event.preventDefault();
    zone.classList.add("over");
  };
  zone.ondragleave = () => zone.classList.remove("over");
  zone.ondrop = (event) => {
    event.preventDefault();
    zone.classList.remove("over");
    got(dropped(event.dataTransfer!));
  };
}
