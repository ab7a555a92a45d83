// The run as the page carries it: a header of JSON, and columns packed as in a .busy file (docs/reference/busy-file.md).

import type { Numbers } from "./timeline";

type Described = [name: string, guess: string, width: number, size: number];

export interface Block<Header> {
  header: Header;
  table(name: string): Promise<Record<string, Numbers>>;
  has(name: string): boolean;
}

interface Tables {
  tables: Record<string, { rows: number; columns: Described[] }>;
}

export async function read<Header extends Tables>(text: string): Promise<Block<Header>> {
  const bytes = fromBase64(text);
  const length = Number(new DataView(bytes.buffer).getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(await inflated(bytes.subarray(8, 8 + length)))) as Header;
  const places = new Map<string, number>();
  let at = 8 + length;
  for (const [name, { columns }] of Object.entries(header.tables)) {
    places.set(name, at);
    for (const [, , , size] of columns) at += size;
  }
  return {
    header,
    has: (name) => places.has(name),
    async table(name) {
      const { rows, columns } = header.tables[name];
      let from = places.get(name)!;
      const packed = columns.map((column) => bytes.subarray(from, (from += column[3])));
      const planes = await Promise.all(packed.map(inflated));
      const table: Record<string, Numbers> = {};
      columns.forEach(([column, guess, width], index) => {
        table[column] = summed(joined(planes[index], width, rows), guess, table);
      });
      return table;
    },
  };
}

function fromBase64(text: string): Uint8Array<ArrayBuffer> {
  const letters = atob(text);
  const bytes = new Uint8Array(letters.length);
  for (let index = 0; index < letters.length; index++) bytes[index] = letters.charCodeAt(index);
  return bytes;
}

async function inflated(bytes: Uint8Array<ArrayBuffer>): Promise<Uint8Array<ArrayBuffer>> {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** Bytes of one worth stand together; this puts each number together again. */
function joined(planes: Uint8Array, width: number, rows: number): Numbers {
  if (width === 1) return new Int8Array(planes.buffer as ArrayBuffer);
  const [two, three] = [2 * rows, 3 * rows];
  if (width === 2) {
    const numbers = new Int16Array(rows);
    for (let row = 0; row < rows; row++) numbers[row] = planes[row] | (planes[rows + row] << 8);
    return numbers;
  }
  const low = new Int32Array(rows);
  for (let row = 0; row < rows; row++) low[row] = planes[row] | (planes[rows + row] << 8) | (planes[two + row] << 16) | (planes[three + row] << 24);
  if (width === 4) return low;
  const high = joined(planes.slice(4 * rows), 4, rows);
  const numbers = new Float64Array(rows);
  for (let row = 0; row < rows; row++) numbers[row] = high[row] * 2 ** 32 + (low[row] >>> 0);
  return numbers;
}

/** From what a column was guessed from and what it differs by, the column. */
function summed(differences: Numbers, guess: string, table: Record<string, Numbers>): Numbers {
  if (guess === "") return differences;
  const numbers = new Float64Array(differences.length);
  if (guess === "before") {
    let sum = 0;
    for (let row = 0; row < numbers.length; row++) numbers[row] = sum += differences[row];
  } else if (guess === "lane") {
    let sum = 0;
    byLane(table.lane).forEach((row, index) => (numbers[row] = sum += differences[index]));
  } else {
    const { start, end } = table;
    for (let row = 0; row < numbers.length; row++) {
      numbers[row] = differences[row] + (guess === "start" ? start[row] : end[row] - start[row]);
    }
  }
  return numbers;
}

/** Rows sorted by their lane, those of one lane in their order. */
export function byLane(lane: Numbers): Int32Array {
  const first: number[] = [];
  for (const one of lane) first[one + 1] = (first[one + 1] ?? 0) + 1;
  for (let one = 0; one < first.length; one++) first[one] = (first[one] ?? 0) + (one ? first[one - 1] : 0);
  const order = new Int32Array(lane.length);
  for (let row = 0; row < lane.length; row++) order[first[lane[row]]++] = row;
  return order;
}
