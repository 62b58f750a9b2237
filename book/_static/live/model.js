// The package's model in plain JavaScript: the same parts under the same names as in Python.
//
// A vector is a Float32Array. A sequence is an array of vectors, one for each position; comments
// give its shape, such as (m, d_model). There is no batch: one sentence is translated at a time.
// All of it stands in one function, so that a worker can be made from its text.
function annotatedTransformer() {
  "use strict";

  const [PAD, BOS, EOS, UNK] = [0, 1, 2, 3];
  const SPECIAL_TOKENS = ["<blank>", "<s>", "</s>", "<unk>"];
  const LONGEST = 32; // tokens of a source; those of the training text have up to about 25

  // --- files ---------------------------------------------------------------------------------

  /** Bytes of a base64 text. */
  function fromBase64(text) {
    return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  }

  /** Tensors of a safetensors file by name, {shape, data}; 8-bit rows times their scales. */
  function readSafetensors(bytes) {
    const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
    const start = 8 + Number(view.getBigUint64(0, true)); // the header ends here
    const header = JSON.parse(new TextDecoder().decode(bytes.subarray(8, start)));
    const stored = {};
    for (const [name, { dtype, shape, data_offsets: [from, to] }] of Object.entries(header)) {
      if (name === "__metadata__") continue;
      const { buffer } = bytes.slice(start + from, start + to);
      stored[name] = { shape, data: new { F32: Float32Array, I8: Int8Array }[dtype](buffer) };
    }
    return dequantise(stored);
  }

  /** Row i of a matrix (rows, columns) is its integers times scale[i]; vectors stay. */
  function dequantise(stored) {
    const found = {};
    for (const [name, { shape, data }] of Object.entries(stored)) {
      if (name.endsWith(".scale")) continue;
      const scale = stored[`${name}.scale`];
      const columns = shape[shape.length - 1];
      const values = scale
        ? Float32Array.from(data, (value, i) => value * scale.data[Math.floor(i / columns)])
        : data;
      found[name] = { shape, data: values };
    }
    return found;
  }

  // --- tokens --------------------------------------------------------------------------------

  const CHUNK = /'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+/gu;

  /** The 256 letters that stand for bytes: printable ones for themselves, others from 256 on. */
  function byteLetters() {
    const printable = (b) => (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
    let next = 256;
    return Array.from({ length: 256 }, (_, b) => String.fromCharCode(printable(b) ? b : next++));
  }

  /** Byte pair encoding: the merges, in the order in which they were learned. */
  class BPETokenizer {
    constructor(merges) {
      this.letters = byteLetters();
      this.bytes = new Map(this.letters.map((letter, byte) => [letter, byte]));
      this.ranks = new Map(merges.map((pair, rank) => [pair.join(" "), rank]));
      const pieces = [...this.letters].sort().concat(merges.map((pair) => pair.join("")));
      this.entries = [...new Set(pieces)];
      this.ids = new Map(this.entries.map((piece, i) => [piece, i + SPECIAL_TOKENS.length]));
    }

    get size() {
      return this.entries.length + SPECIAL_TOKENS.length;
    }

    /** Numbers of the tokens, without beginning and end. */
    encode(text) {
      if (!text) return [];
      const chunks = ` ${text}`.match(CHUNK); // a word is the same token wherever it stands
      return chunks.flatMap((chunk) => this.merge(chunk).map((piece) => this.ids.get(piece)));
    }

    /** Join the neighbours whose merge was learned first, until there are none. */
    merge(chunk) {
      let pieces = Array.from(new TextEncoder().encode(chunk), (byte) => this.letters[byte]);
      for (;;) {
        const ranks = pieces.slice(1).map(
          (piece, i) => this.ranks.get(`${pieces[i]} ${piece}`) ?? Infinity,
        );
        const best = Math.min(...ranks);
        if (best === Infinity) return pieces;
        const i = ranks.indexOf(best);
        pieces = [...pieces.slice(0, i), pieces[i] + pieces[i + 1], ...pieces.slice(i + 2)];
      }
    }

    /** The text of numbers; special tokens are left out. */
    decode(ids) {
      const pieces = ids.filter((id) => id > UNK).map((id) => this.piece(id));
      const bytes = Array.from(pieces.join(""), (letter) => this.bytes.get(letter));
      return new TextDecoder().decode(Uint8Array.from(bytes)).replace(/^ /, "");
    }

    piece(id) {
      return this.entries[id - SPECIAL_TOKENS.length];
    }

    /** A label for every number; a leading blank is shown as ▁. */
    tokens(ids) {
      return ids.map((id) => {
        if (id <= UNK) return SPECIAL_TOKENS[id];
        const bytes = Array.from(this.piece(id), (letter) => this.bytes.get(letter));
        return new TextDecoder().decode(Uint8Array.from(bytes)).replaceAll(" ", "▁");
      });
    }
  }

  // --- the model -----------------------------------------------------------------------------

  /** The weighted sum of two vectors' components. */
  function dot(a, b, from = 0, to = a.length) {
    let sum = 0;
    for (let i = from; i < to; i++) sum += a[i] * b[i];
    return sum;
  }

  function add(x, y) {
    return x.map((value, i) => value + y[i]);
  }

  /** Probabilities from scores. */
  function softmax(scores) {
    const most = scores.reduce((a, b) => Math.max(a, b));
    const powers = scores.map((score) => Math.exp(score - most));
    const sum = powers.reduce((a, b) => a + b);
    return powers.map((power) => power / sum);
  }

  /** y = x W^T + b, for one position. */
  class Linear {
    constructor({ shape, data }, bias) {
      const [rows, columns] = shape;
      this.weight = Array.from({ length: rows }, (_, i) =>
        data.subarray(i * columns, (i + 1) * columns)); // (out, in)
      this.bias = bias.data; // (out,)
    }

    forward(x) {
      return Float32Array.from(this.weight, (row, i) => dot(row, x) + this.bias[i]);
    }
  }

  /** Mean 0 and variance 1, rescaled. */
  class LayerNorm {
    constructor(weight, bias, eps = 1e-5) {
      [this.weight, this.bias, this.eps] = [weight.data, bias.data, eps];
    }

    forward(x) {
      const mean = x.reduce((a, b) => a + b) / x.length;
      const variance = x.reduce((sum, value) => sum + (value - mean) ** 2, 0) / x.length;
      const std = Math.sqrt(variance + this.eps);
      return x.map((value, i) => (this.weight[i] * (value - mean)) / std + this.bias[i]);
    }
  }

  /** LayerNorm(x + Sublayer(x)), as the paper prints it. */
  class SublayerConnection {
    constructor(norm) {
      this.norm = norm;
    }

    forward(x, sublayer) {
      return this.norm.forward(add(x, sublayer(x)));
    }
  }

  class PositionwiseFeedForward {
    constructor(w_1, w_2) {
      [this.w_1, this.w_2] = [w_1, w_2];
    }

    forward(x) {
      const hidden = this.w_1.forward(x).map((value) => Math.max(0, value)); // (d_ff,)
      return this.w_2.forward(hidden);
    }
  }

  /** Keys and values of the positions seen so far: a KV cache. */
  class Cache {
    constructor(keys = [], values = []) {
      [this.keys, this.values] = [keys, values]; // each (m, d_model)
    }

    copy() {
      return new Cache([...this.keys], [...this.values]);
    }
  }

  class MultiHeadedAttention {
    constructor(linears, h) {
      [this.linears, this.h] = [linears, h]; // W_Q, W_K, W_V, W_O, with biases
      this.muted = new Set(); // heads that add nothing to the output
    }

    /** Add the key and the value of a position x (d_model,). */
    remember(x, cache) {
      cache.keys.push(this.linears[1].forward(x));
      cache.values.push(this.linears[2].forward(x));
    }

    /** Attend from x (d_model,) to the positions of a cache; weights are (h, m). */
    forward(x, { keys, values }) {
      const query = this.linears[0].forward(x);
      const d_k = query.length / this.h;
      const joined = new Float32Array(query.length);
      const weights = [];
      for (let head = 0; head < this.h; head++) {
        const [from, to] = [head * d_k, (head + 1) * d_k]; // this head's components
        const scores = keys.map((key) => dot(query, key, from, to) / Math.sqrt(d_k)); // (m,)
        const attn = softmax(scores);
        weights.push(Float32Array.from(attn));
        if (this.muted.has(head)) continue; // its components stay 0
        for (let i = from; i < to; i++)
          joined[i] = attn.reduce((sum, weight, j) => sum + weight * values[j][i], 0);
      }
      return [this.linears[3].forward(joined), weights];
    }
  }

  class EncoderLayer {
    constructor(parts) {
      Object.assign(this, parts); // self_attn, feed_forward, sublayer
    }

    /** x (m, d_model) to the same shape; every position attends to all. */
    forward(x, attention) {
      const cache = new Cache();
      for (const position of x) this.self_attn.remember(position, cache);
      const rows = []; // (m, h, m)
      const y = x.map((position) => {
        const attended = this.sublayer[0].forward(position, (p) => {
          const [output, weights] = this.self_attn.forward(p, cache);
          rows.push(weights);
          return output;
        });
        return this.sublayer[1].forward(attended, (p) => this.feed_forward.forward(p));
      });
      // (m, h, m) to (h, m, m)
      attention.push(rows[0].map((_, head) => rows.map((row) => row[head])));
      return y;
    }
  }

  class DecoderLayer {
    constructor(parts) {
      Object.assign(this, parts); // self_attn, src_attn, feed_forward, sublayer
    }

    /** One more position x (d_model,); the cache holds those before it, and nothing after it. */
    forward(x, past, memory, attention) {
      let weights;
      this.self_attn.remember(x, past);
      x = this.sublayer[0].forward(x, (p) => {
        let output;
        [output, weights] = this.self_attn.forward(p, past);
        return output;
      });
      attention.self.push(weights); // (h, n)
      x = this.sublayer[1].forward(x, (p) => {
        let output;
        [output, weights] = this.src_attn.forward(p, memory);
        return output;
      });
      attention.cross.push(weights); // (h, m)
      return this.sublayer[2].forward(x, (p) => this.feed_forward.forward(p));
    }
  }

  /** Position pos of the sinusoids of section 3.5: (d_model,). */
  function positionalEncoding(pos, d_model) {
    return Float32Array.from({ length: d_model }, (_, i) => {
      const angle = pos / 10000 ** ((i - (i % 2)) / d_model);
      return i % 2 ? Math.cos(angle) : Math.sin(angle);
    });
  }

  class EncoderDecoder {
    /** Build the model from config.json's sizes and the tensors of model.safetensors. */
    constructor(sizes, tensors) {
      if (sizes.norm !== "post" || sizes.positions !== "sinusoid" || sizes.tie !== "all")
        throw new Error("this page computes post-norm, sinusoids and shared embeddings alone");
      this.sizes = sizes;
      this.seen = null; // while a sentence is traced: what each part returned, (n, width) by name
      const linear = (name) => this.watch(name,
        new Linear(tensors[`${name}.weight`], tensors[`${name}.bias`]));
      const attention = (name) => {
        const linears = [0, 1, 2, 3].map((i) => linear(`${name}.linears.${i}`));
        return this.watch(name, new MultiHeadedAttention(linears, sizes.h));
      };
      const network = (name) => this.watch(name,
        new PositionwiseFeedForward(linear(`${name}.w_1`), linear(`${name}.w_2`)));
      const sublayer = (name, i) => {
        const norm = `${name}.sublayer.${i}.norm`;
        return this.watch(`${name}.sublayer.${i}`, new SublayerConnection(
          new LayerNorm(tensors[`${norm}.weight`], tensors[`${norm}.bias`])));
      };
      const layers = (stack, build) =>
        Array.from({ length: sizes.N }, (_, i) => build(`${stack}.layers.${i}`));
      this.encoder = layers("encoder", (name) => new EncoderLayer({
        self_attn: attention(`${name}.self_attn`),
        feed_forward: network(`${name}.feed_forward`),
        sublayer: [0, 1].map((i) => sublayer(name, i)),
      }));
      this.decoder = layers("decoder", (name) => new DecoderLayer({
        self_attn: attention(`${name}.self_attn`),
        src_attn: attention(`${name}.src_attn`),
        feed_forward: network(`${name}.feed_forward`),
        sublayer: [0, 1, 2].map((i) => sublayer(name, i)),
      }));
      // One matrix (V, d_model) embeds source and target, and gives the logits.
      const shared = tensors["src_embed.0.lut.weight"];
      const logits = new Linear(shared, tensors["generator.proj.bias"]);
      this.generator = this.watch("generator.proj", logits);
    }

    /** Let a part keep what it returns, as long as there is a place for it. */
    watch(name, part) {
      const forward = part.forward.bind(part);
      part.forward = (...inputs) => {
        const output = forward(...inputs); // that of an attention comes with its weights
        this.keep(name, Array.isArray(output) ? output[0] : output);
        return output;
      };
      return part;
    }

    keep(name, x) {
      if (this.seen) (this.seen[name] ??= []).push(x);
      return x;
    }

    /** Mute these heads alone, each [kind, layer, head] with kind encoder, self or cross. */
    mute(heads) {
      const attentions = {
        encoder: this.encoder.map((layer) => layer.self_attn),
        self: this.decoder.map((layer) => layer.self_attn),
        cross: this.decoder.map((layer) => layer.src_attn),
      };
      for (const attention of Object.values(attentions).flat()) attention.muted.clear();
      for (const [kind, layer, head] of heads) attentions[kind][layer].muted.add(head);
    }

    /** A token at a position: its row times sqrt(d_model), plus the position's sinusoids. */
    embed(token, pos) {
      const { d_model } = this.sizes;
      const row = this.generator.weight[token].map((value) => value * Math.sqrt(d_model));
      return add(row, positionalEncoding(pos, d_model));
    }

    /** Encode tokens (m,): what each decoder layer remembers of them, and weights (N, h, m, m). */
    encode(src) {
      const attention = [];
      let x = src.map((token, pos) => this.keep("src_embed", this.embed(token, pos))); // (m, d_model)
      for (const layer of this.encoder) x = layer.forward(x, attention);
      const memories = this.decoder.map((layer) => {
        const memory = new Cache();
        for (const position of x) layer.src_attn.remember(position, memory);
        return memory;
      });
      return { memories, attention };
    }

    /** Caches of the decoder's layers, still empty. */
    begin() {
      return this.decoder.map(() => new Cache());
    }

    /** Decode one more token: probabilities of the next one (V,), and where it attended. */
    decode(memories, caches, token) {
      const attention = { self: [], cross: [] }; // (N, h, n) and (N, h, m)
      let x = this.keep("tgt_embed", this.embed(token, caches[0].keys.length));
      this.decoder.forEach((layer, i) => {
        x = layer.forward(x, caches[i], memories[i], attention);
      });
      return { probabilities: softmax(this.generator.forward(x)), attention };
    }

    /** What every part returns for a source and the tokens that the decoder reads. */
    trace(src, tgt) {
      this.seen = {};
      const { memories } = this.encode(src);
      const caches = this.begin();
      for (const token of tgt) this.decode(memories, caches, token);
      const { seen } = this;
      this.seen = null;
      return seen;
    }
  }

  // --- search --------------------------------------------------------------------------------

  const argmax = (values) => values.reduce((best, value, i) => (value > values[best] ? i : best), 0);

  /** Yield the most probable token, one after the other: {token, probability, attention}. */
  function* greedyDecode(model, memories, limit) {
    const caches = model.begin();
    let token = BOS;
    for (let i = 0; i < limit && token !== EOS; i++) {
      const { probabilities, attention } = model.decode(memories, caches, token);
      token = argmax(probabilities);
      yield { token, probability: probabilities[token], attention };
    }
  }

  const lengthPenalty = (length, alpha) => ((5 + length) / 6) ** alpha;

  /** Keep the best hypotheses of each length; yield the steps of the best output (section 6.1). */
  function* beamSearch(model, memories, limit, beam = 4, alpha = 0.6) {
    let open = [{ steps: [], caches: model.begin(), log: 0 }];
    let [best, places] = [{ score: -Infinity, steps: [] }, beam];
    for (let length = 1; length <= limit && open.length; length++) {
      // A longer output can win at most by what its log-probability is now.
      if (open[0].log / lengthPenalty(limit, alpha) <= best.score) break;
      const grown = open.flatMap(({ steps, caches, log }) => {
        const own = caches.map((cache) => cache.copy());
        const last = steps.length ? steps[steps.length - 1].token : BOS;
        const { probabilities, attention } = model.decode(memories, own, last);
        const order = Array.from(probabilities.keys()).sort(
          (a, b) => probabilities[b] - probabilities[a] || a - b);
        return order.slice(0, beam).map((token) => {
          const probability = probabilities[token];
          const step = { token, probability, attention };
          return { steps: [...steps, step], caches: own, log: log + Math.log(probability) };
        });
      });
      open = [];
      for (const one of grown.sort((a, b) => b.log - a.log).slice(0, places)) {
        if (one.steps[length - 1].token !== EOS && length < limit) {
          open.push(one);
          continue;
        }
        places -= 1;
        const score = one.log / lengthPenalty(length, alpha);
        if (score > best.score) best = { score, steps: one.steps };
      }
    }
    yield* best.steps;
  }

  // --- what the page asks --------------------------------------------------------------------

  /** A text that the model cannot translate; the message says why. */
  class InputError extends Error {}

  class Translator {
    /** Takes the package's files: config, tokenizer and words as objects, weights as bytes. */
    constructor({ config, tokenizer, words }, bytes) {
      this.tokenizer = new BPETokenizer(tokenizer.merges);
      this.model = new EncoderDecoder(config.model, readSafetensors(bytes));
      this.words = { de: new Set(words.de), en: new Set(words.en) };
    }

    /** Words of a text that were never seen in training, or not in one language, in order. */
    unknown(text, languages = ["de", "en"]) {
      const known = (word) => languages.some((language) => this.words[language].has(word));
      const found = text.match(/[\p{L}\p{N}_]+/gu) ?? [];
      return found.filter((word, i) =>
        !known(word) && !(i === 0 && known(word[0].toLowerCase() + word.slice(1))));
    }

    /** A known word that differs from this one only in its first letter's case. */
    otherCase(word) {
      const [first, rest] = [word[0], word.slice(1)];
      return [first.toUpperCase() + rest, first.toLowerCase() + rest]
        .find((other) => this.words.de.has(other) || this.words.en.has(other));
    }

    /** The language in which more of the words are known. */
    language(text) {
      const found = text.match(/[\p{L}\p{N}_]+/gu) ?? [];
      const count = (words) =>
        found.filter((word) => words.has(word) || words.has(word.toLowerCase())).length;
      return count(this.words.de) >= count(this.words.en) ? "de" : "en";
    }

    /** Return the tokens of a text, its end included, or throw an InputError. */
    encode(text) {
      if (!/[\p{L}\p{N}]/u.test(text)) throw new InputError("Please type a sentence.");
      const unknown = this.unknown(text);
      if (unknown.length) {
        const names = [...new Set(unknown)].map((word) => {
          const other = this.otherCase(word);
          return other ? `“${word}” (perhaps “${other}”?)` : `“${word}”`;
        }).join(", ");
        const what = names.includes(",") ? "these words" : "this word";
        throw new InputError(`The model does not know ${what}: ${names}. `
          + `It has learned ${this.words.de.size} German and ${this.words.en.size} English words.`);
      }
      const language = this.language(text);
      const foreign = this.unknown(text, [language]);
      if (foreign.length) {
        const [own, other] = language === "de" ? ["German", "English"] : ["English", "German"];
        throw new InputError(`“${foreign[0]}” is ${other}, but the sentence is ${own}. `
          + "Please write it in one language.");
      }
      const ids = this.tokenizer.encode(text);
      if (ids.length > LONGEST) {
        throw new InputError(`This sentence has ${ids.length} tokens, and the model takes at most `
          + `${LONGEST}. Please shorten it.`);
      }
      return [...ids, EOS];
    }

    /** Yield {source, attention, …} of the encoder, {token, …} of each decoder step, {trace}. */
    *translate(text, { beam = 1, muted = [], trace = false } = {}) {
      const src = this.encode(text);
      this.model.mute(muted);
      const { memories, attention } = this.model.encode(src);
      const language = this.language(text);
      yield { source: this.tokenizer.tokens(src), ids: src, attention, language };
      const limit = Math.min(this.model.sizes.max_len, src.length - 1 + 50);
      const steps = beam > 1
        ? beamSearch(this.model, memories, limit, beam)
        : greedyDecode(this.model, memories, limit);
      const ids = [];
      for (const step of steps) {
        if (step.token !== EOS) ids.push(step.token);
        const [label] = this.tokenizer.tokens([step.token]);
        yield { ...step, label, text: this.tokenizer.decode(ids) };
      }
      if (trace) yield { trace: this.model.trace(src, [BOS, ...ids]) };
    }
  }

  return { BPETokenizer, EncoderDecoder, InputError, Translator, fromBase64, readSafetensors };
}
