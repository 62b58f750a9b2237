// The model in the page: a sentence in, its translation token by token, and the attention weights.
(() => {
  "use strict";

  const HERE = document.currentScript.src.replace(/[^/]*$/, "");
  const { endpoint } = document.currentScript.dataset; // of a server that has the model, if any
  const EXAMPLES = [
    "Der Bäcker wirft meine neue Zeitung weg, weil sie nass ist.",
    "The baker throws away my new newspaper because it is wet.",
    "Der seltsame Schlüssel, den unser Gärtner wegwirft, liegt neben meinem Bett.",
    "If my hungry father gets up, our lazy doctors can eat cold cheese.",
    "Unsere Sängerinnen, denen die mutige Schwester geantwortet hat, waren nicht jung.",
    "The children saw a black cat in the garden.",
  ];
  const KINDS = {
    cross: ["cross-attention", "The decoder attends to the source."],
    self: ["decoder self-attention", "The decoder attends to what it has read so far."],
    encoder: ["encoder self-attention", "The encoder attends to its own sentence."],
  };
  const ROW = 28; // height of a token, in pixels, as in widget.css
  const LEAST = 0.02; // weights below this are not drawn as ribbons
  const WHOLE = /^\p{Lu}.*[.?!]$/u;
  const HINT = "The model has learned from whole sentences. It translates best what begins with a "
    + "capital letter and ends with a full stop or a question mark.";
  const still = matchMedia("(prefers-reduced-motion: reduce)");

  // --- the model, loaded when it is first used ------------------------------------------------

  const load = (name) => new Promise((done, failed) => {
    const script = document.createElement("script");
    script.src = HERE + name;
    script.onload = done;
    script.onerror = () => failed(new Error(`${name} could not be loaded`));
    document.head.append(script);
  });

  /** Translate in slices on the page's own thread; `report` takes what the model yields. */
  function pageEngine(vocabulary, bytes) {
    const { Translator } = annotatedTransformer();
    const translator = new Translator(vocabulary, bytes);
    return async (text, options, report) => {
      for (const step of translator.translate(text, options)) {
        report(step);
        await new Promise((done) => setTimeout(done)); // the page stays responsive
      }
    };
  }

  /** What a worker runs, besides the model itself. */
  function serve() {
    let translator;
    self.onmessage = ({ data: { id, vocabulary, bytes, text, options } }) => {
      try {
        if (vocabulary) {
          const { Translator } = annotatedTransformer();
          translator = new Translator(vocabulary, bytes);
        } else {
          for (const step of translator.translate(text, options)) self.postMessage({ id, step });
        }
        self.postMessage({ id, done: true });
      } catch (error) {
        self.postMessage({ id, error: error.message });
      }
    };
  }

  /** Translate in a worker made from the model's own text; rejects where workers are refused. */
  function workerEngine(vocabulary, bytes) {
    const source = `${annotatedTransformer}\n(${serve})();`;
    const worker = new Worker(URL.createObjectURL(new Blob([source], { type: "text/javascript" })));
    const waiting = new Map();
    let last = 0;
    const ask = (message, report) => new Promise((done, failed) => {
      waiting.set(++last, { report, done, failed });
      worker.postMessage({ id: last, ...message });
    });
    worker.onmessage = ({ data: { id, step, error } }) => {
      const { report, done, failed } = waiting.get(id);
      if (step) return report(step);
      waiting.delete(id);
      return error ? failed(new Error(error)) : done();
    };
    worker.onerror = (event) => {
      event.preventDefault();
      for (const { failed } of waiting.values()) failed(new Error("the worker was refused"));
    };
    return ask({ vocabulary, bytes })
      .then(() => (text, options, report) => ask({ text, options }, report));
  }

  /** Ask the server; report what it answers as the steps that the model in the page yields. */
  async function servedEngine(text, options, report) {
    const answer = await fetch(endpoint, {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ sentence: text, ...options }),
    }).catch(() => { throw new Error("The server does not answer."); });
    const found = await answer.json();
    if (!answer.ok) throw new Error(found.error);
    const { source, encoder, languages, note } = found;
    report({ source, attention: encoder, languages, note });
    const rows = (layers, i, length) =>
      layers.map((heads) => heads.map((head) => head[i].slice(0, length)));
    found.target.forEach((label, i) => report({
      label,
      text: found.texts[i],
      probability: found.probabilities[i],
      attention: { self: rows(found.self, i, i + 1), cross: rows(found.cross, i) },
    }));
  }

  let engine; // a promise, shared by all widgets of a page

  function start() {
    engine ??= (async () => {
      if (endpoint) return servedEngine;
      for (const name of ["model.js", "vocabulary.js", "weights.js"]) await load(name);
      const bytes = annotatedTransformer().fromBase64(annotatedTransformerWeights);
      try {
        return await workerEngine(annotatedTransformerVocabulary, bytes);
      } catch {
        return pageEngine(annotatedTransformerVocabulary, bytes);
      }
    })().catch((error) => {
      engine = undefined; // the next sentence tries again
      throw error;
    });
    return engine;
  }

  // --- small helpers --------------------------------------------------------------------------

  function element(tag, properties = {}, ...children) {
    const { dataset = {}, aria = {}, ...rest } = properties;
    const made = Object.assign(document.createElement(tag), rest);
    Object.assign(made.dataset, dataset);
    for (const [name, value] of Object.entries(aria)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }

  function svg(tag, attributes) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    return made;
  }

  const option = (value, text) => element("option", { value }, text);
  const select = (options) => element("select", {},
    ...options.map(([value, text]) => option(value, text)));
  const labelled = (text, control) =>
    element("label", {}, element("span", {}, text), control);
  const percent = (share) => `${(100 * share).toFixed(share > 0.995 || share < 0.1 ? 1 : 0)} %`;
  // A token as readers know it: words without the mark of their blank, parts of words with dots.
  const shown = (label) => (label.startsWith("▁") ? label.slice(1)
    : /^[\p{L}\p{N}]/u.test(label) ? `…${label}` : label);
  const NAMES = new Intl.DisplayNames(["en"], { type: "language", fallback: "code" });
  const named = (code) => {
    try { return NAMES.of(code); } catch { return code; } // not every name of a file is a language
  };
  const mean = (rows) => rows[0].map((_, i) =>
    rows.reduce((sum, row) => sum + row[i], 0) / rows.length);

  // --- one widget -----------------------------------------------------------------------------

  class Widget {
    constructor(box) {
      this.box = box;
      this.run = 0; // of the latest translation: what an older one yields is ignored
      this.steps = [];
      this.selected = 0;
      this.id = `translator-${[...document.querySelectorAll(".translator")].indexOf(box)}`;
      this.buildForm();
      this.buildView();
      this.muted = new Map(); // [kind, layer, head] by the name of its button
      this.whole = {}; // what was asked last with all heads, and the answer
      box.prepend(this.form, this.message, this.view);
      box.dataset.ready = "yes";
    }

    buildForm() {
      this.input = element("input", {
        type: "text", value: this.box.dataset.sentence, autocomplete: "off", spellcheck: false,
        maxLength: 400, aria: { "aria-describedby": `${this.id}-message` },
      });
      const first = ["", "Choose an example"];
      const { label } = this.box.dataset; // of a system that is not the book's own
      this.examples = select([first, ...EXAMPLES.map((text) => [text, text])]);
      this.search = select([["1", "greedy"], ["4", "beam of 4"]]);
      this.button = element("button", { type: "submit" }, "Translate");
      this.form = element("form", { className: "translator-form" },
        labelled(label ?? "A sentence, German or English", this.input),
        element("div", { className: "translator-row" },
          ...(label ? [] : [labelled("Examples", this.examples)]), labelled("Search", this.search), this.button));
      this.message = element("p", {
        className: "translator-message", id: `${this.id}-message`, aria: { role: "alert" },
      });
      this.form.addEventListener("submit", (event) => {
        event.preventDefault();
        this.translate();
      });
      this.input.addEventListener("focus", () => { start().catch(() => {}); });
      this.examples.addEventListener("change", () => {
        if (!this.examples.value) return;
        this.input.value = this.examples.value;
        this.translate();
      });
      this.search.addEventListener("change", () => { if (this.steps.length) this.translate(); });
    }

    buildView() {
      this.output = element("p", { className: "translator-output", aria: { role: "status" } });
      this.kind = select(Object.entries(KINDS).map(([value, [text]]) => [value, text]));
      this.layer = element("select");
      this.head = element("select");
      this.keys = element("ul", { className: "translator-keys", aria: { "aria-hidden": "true" } });
      this.ribbons = svg("svg", { class: "translator-ribbons", "aria-hidden": "true" });
      this.queries = element("ul", { className: "translator-queries", aria: { role: "listbox" } });
      this.heat = element("div", { className: "translator-heat", aria: { role: "img" } });
      this.reading = element("p", {
        className: "translator-reading", aria: { role: "status", "aria-live": "polite" },
      });
      this.heads = element("div", { className: "translator-heads", aria: { "aria-hidden": "true" } });
      this.mixer = element("div", {
        className: "translator-mixer", hidden: this.box.dataset.mixer === undefined,
        aria: { role: "group", "aria-label": "Heads to mute" },
      });
      this.mixer.addEventListener("click", (event) => this.mix(event));
      this.weights = element("div", {},
        element("div", { className: "translator-row" }, labelled("Weights", this.kind),
          labelled("Layer", this.layer), labelled("Head", this.head)),
        this.reading,
        element("div", { className: "translator-pictures" },
          element("div", {}, this.heads,
            element("div", { className: "translator-bridge" },
              this.keys, this.ribbons, this.queries)),
          this.heat));
      this.view = element("div", { className: "translator-view", hidden: true },
        this.output, this.mixer, this.weights, this.buildTrace());
      for (const control of [this.kind, this.layer, this.head])
        control.addEventListener("change", () => this.draw());
      this.queries.addEventListener("keydown", (event) => this.move(event));
      for (const part of [this.queries, this.heat]) {
        part.addEventListener("pointerover", (event) => this.point(event));
        part.addEventListener("click", (event) => this.point(event));
      }
      new ResizeObserver(() => this.drawRibbons()).observe(this.ribbons);
    }

    /** A part of the model and a token to choose, and the vector that the part returned for it. */
    buildTrace() {
      this.part = element("select");
      this.token = element("select");
      this.norm = element("p", { className: "translator-norm", aria: { role: "status" } });
      this.numbers = element("div", {
        className: "translator-numbers", tabIndex: 0,
        aria: { role: "region", "aria-label": "components of the vector" },
      });
      this.part.addEventListener("change", () => this.drawTrace());
      this.token.addEventListener("change", () => this.drawNumbers());
      return element("div", { hidden: this.box.dataset.trace === undefined },
        element("div", { className: "translator-row" },
          labelled("What this part returned", this.part), labelled("for this token", this.token)),
        this.norm, this.numbers);
    }

    /** Offer the parts, and the tokens that the chosen one has seen. */
    drawTrace() {
      if (!this.part.options.length) {
        this.part.append(...Object.keys(this.trace).map((name) => option(name, name)));
        this.part.value = "encoder.layers.0.self_attn";
      }
      const read = ["<s>", ...this.steps.map(({ label }) => label)];
      const ofSource = /^(src_embed|encoder)|src_attn\.linears\.[12]$/.test(this.part.value);
      const labels = this.trace[this.part.value].map((_, i) =>
        (ofSource ? this.source.source : read)[i]);
      const { value } = this.token;
      this.token.replaceChildren(...labels.map((label, i) => option(i, shown(label))));
      this.token.value = value && value < labels.length ? value : 0;
      this.drawNumbers();
    }

    drawNumbers() {
      const x = Array.from(this.trace[this.part.value][this.token.value]);
      const most = Math.max(...x.map(Math.abs));
      const norm = Math.sqrt(x.reduce((sum, value) => sum + value * value, 0));
      const written = (value) => value.toFixed(2).replace(/^-0\.00$/, "0.00").replace("-", "\u2212");
      this.norm.textContent = `${x.length} components, from ${written(Math.min(...x))} to `
        + `${written(Math.max(...x))}; norm ${written(norm)}.`;
      this.numbers.replaceChildren(...x.map((value, i) => {
        const cell = element("span", { className: "cell", title: `component ${i}` }, written(value));
        cell.style.setProperty("--weight", (0.35 * Math.abs(value) / most).toFixed(3));
        if (value < 0) cell.classList.add("negative");
        return cell;
      }));
    }

    /** Translate what stands in the field, and show each token as it comes. */
    async translate() {
      const run = ++this.run;
      const text = this.input.value.normalize("NFC").trim().replace(/\s+/g, " ");
      this.say(engine ? "" : "Loading the model …");
      this.box.setAttribute("aria-busy", "true");
      let turn = Promise.resolve(); // tokens are shown one after the other
      const report = (step) => {
        turn = turn.then(() => (run === this.run ? this.show(step) : undefined));
      };
      try {
        const translate = await start();
        const options = { beam: Number(this.search.value) };
        if (this.muted.size) options.muted = [...this.muted.values()];
        if (this.box.dataset.trace !== undefined) options.trace = true;
        await translate(text, options, report);
        await turn;
        if (run === this.run) this.finish(text);
      } catch (error) {
        if (run === this.run) {
          this.say(error.message, true);
          this.view.hidden = true; // an older translation is not of this sentence
        }
      }
      if (run === this.run) this.box.removeAttribute("aria-busy");
    }

    say(text, wrong = false) {
      this.message.textContent = text;
      this.message.classList.toggle("wrong", wrong);
      if (wrong) this.input.setAttribute("aria-invalid", "true");
      else this.input.removeAttribute("aria-invalid");
    }

    async show(step) {
      if (step.trace) {
        this.trace = step.trace;
        this.drawTrace();
        return;
      }
      if (step.source) {
        this.source = step;
        this.steps = [];
        this.selected = 0;
        this.say("");
        this.languages = step.languages
          ?? (step.language === "de" ? ["de", "en"] : ["en", "de"]);
        const [from, to] = this.languages.map(named);
        this.output.replaceChildren(`${from} to ${to}: `, element("strong"));
        this.output.lastChild.lang = this.languages[1];
        for (const part of [this.output, this.reading])
          part.setAttribute("aria-live", "off"); // until the translation is whole
        this.choices();
        this.view.hidden = false;
        const next = this.box.dataset.replaces === "next" && this.box.nextElementSibling;
        const fallback = next || this.box.querySelector(".translator-fallback");
        if (fallback) fallback.hidden = true;
      } else {
        this.steps.push(step);
        this.output.lastChild.textContent = step.text;
        this.selected = this.steps.length - 1;
      }
      this.draw();
      if (!still.matches && !document.hidden) await new Promise((done) => setTimeout(done, 90));
    }

    /** The translation is whole: now it is read aloud, and the first token is chosen. */
    finish(text) {
      for (const part of [this.output, this.reading]) part.setAttribute("aria-live", "polite");
      const output = this.steps[this.steps.length - 1].text;
      this.output.lastChild.textContent = output;
      this.select(0);
      const asked = `${this.search.value} ${text}`;
      if (!this.muted.size) this.whole = { asked, output };
      else if (this.whole.asked === asked) return this.say(this.compared(output));
      if (this.source.note) this.say(this.source.note);
      else if (!WHOLE.test(text) && !this.box.dataset.label) this.say(HINT);
    }

    /** Offer the layers and heads that the model has. */
    choices() {
      const { attention } = this.source; // (N, h, m, m); a served system may have none
      this.weights.hidden = !attention.length;
      if (this.layer.options.length || !attention.length) return;
      attention.forEach((_, i) => this.layer.append(option(i, `${i + 1}`)));
      this.layer.value = attention.length - 1;
      this.head.append(option("mean", "mean of all"),
        ...attention[0].map((_, i) => option(i, `${i + 1}`)));
      if (!this.mixer.hidden) this.fillMixer(attention.length, attention[0].length);
    }

    /** A row of buttons for each attention of the model, and one that brings all heads back. */
    fillMixer(layers, count) {
      const names = { encoder: "encoder", self: "decoder", cross: "cross-attention" };
      this.mixer.append(element("p", {}, "Press a head to mute it:"));
      for (const [kind, name] of Object.entries(names)) {
        for (let layer = 0; layer < layers; layer++) {
          this.mixer.append(element("span", {}, `${name} ${layer + 1}`));
          const row = element("span", {}, ...Array.from({ length: count }, (_, head) =>
            element("button", {
              type: "button", dataset: { head: `${kind} ${layer} ${head}` },
              aria: { "aria-pressed": "false",
                "aria-label": `head ${head + 1} of ${name}, layer ${layer + 1}` },
            }, `${head + 1}`)));
          this.mixer.append(row);
        }
      }
      this.mixer.append(element("button", { type: "button", dataset: { head: "" } }, "all heads"));
    }

    /** Mute a head, or let it speak again, and translate anew. */
    mix({ target }) {
      const name = target.closest("button")?.dataset.head;
      if (name === undefined) return;
      const [kind, layer, head] = name.split(" ");
      if (!name) this.muted.clear();
      else if (!this.muted.delete(name)) this.muted.set(name, [kind, Number(layer), Number(head)]);
      for (const button of this.mixer.querySelectorAll("[aria-pressed]"))
        button.setAttribute("aria-pressed", this.muted.has(button.dataset.head));
      this.translate();
    }

    /** What muting has changed. */
    compared(output) {
      const heads = this.muted.size === 1 ? "this head" : `these ${this.muted.size} heads`;
      return output === this.whole.output ? `Without ${heads} the translation is the same.`
        : `Without ${heads} the translation changes. With all heads it is: ${this.whole.output}`;
    }

    /** Labels of keys and queries, their languages, and the weights (queries, keys). */
    data() {
      const written = this.steps.map(({ label }) => label);
      const layer = Number(this.layer.value);
      const pick = (heads) => (this.head.value === "mean" ? mean(heads) : heads[this.head.value]);
      const [from, to] = this.languages;
      if (this.kind.value === "encoder") {
        const heads = this.source.attention[layer]; // (h, m, m)
        const rows = this.source.source.map((_, i) => pick(heads.map((head) => Array.from(head[i]))));
        return { keys: this.source.source, queries: this.source.source, rows, langs: [from, from] };
      }
      const cross = this.kind.value === "cross";
      const rows = this.steps.map(({ attention }) =>
        pick(attention[cross ? "cross" : "self"][layer].map((head) => Array.from(head))));
      return cross
        ? { keys: this.source.source, queries: written, rows, langs: [from, to] }
        : { keys: ["<s>", ...written.slice(0, -1)], queries: written, rows, langs: [to, to] };
    }

    draw() {
      if (!this.source?.attention.length) return;
      this.now = this.data();
      const { keys, queries, langs } = this.now;
      const [key, query] = this.kind.value === "encoder" ? ["attended to", "attends"]
        : [this.kind.value === "cross" ? "source" : "read so far", "next token"];
      this.heads.replaceChildren(element("span", {}, key), element("span", {}, query));
      this.keys.lang = langs[0];
      this.queries.lang = langs[1];
      this.keys.replaceChildren(...keys.map((label) => element("li", {}, shown(label))));
      this.fill(queries);
      const [kind] = KINDS[this.kind.value];
      this.queries.setAttribute("aria-label",
        `${kind}: choose a token to see its weights`);
      this.queries.parentElement.style.height = `${ROW * Math.max(keys.length, queries.length)}px`;
      this.drawHeat();
      this.select(Math.min(this.selected, queries.length - 1));
    }

    /** Keep the tokens that are there: one of them may have the focus. */
    fill(queries) {
      const items = [...this.queries.children];
      queries.forEach((label, i) => {
        const item = items[i] ?? this.queries.appendChild(
          element("li", { aria: { role: "option" }, dataset: { query: i } }));
        if (item.textContent !== shown(label)) item.textContent = shown(label);
      });
      items.slice(queries.length).forEach((item) => item.remove());
    }

    drawHeat() {
      const { keys, queries, rows } = this.now;
      const narrow = keys.length > 16 ? " dense" : "";
      this.heat.className = `translator-heat${narrow}`;
      this.heat.style.gridTemplateColumns = `max-content repeat(${keys.length}, minmax(0, 1fr))`;
      const cells = [element("span")];
      for (const label of keys)
        cells.push(element("span", { className: "heat-column" }, element("span", {}, shown(label))));
      queries.forEach((label, i) => {
        cells.push(element("span", { className: "heat-row", dataset: { query: i } }, shown(label)));
        keys.forEach((key, j) => {
          const weight = rows[i][j];
          const cell = element("span", { className: "cell", dataset: { query: i } });
          if (weight === undefined) cell.classList.add("masked");
          else {
            cell.style.setProperty("--weight", weight.toFixed(4));
            cell.title = `${shown(label)} – ${shown(key)}: ${percent(weight)}`;
          }
          cells.push(cell);
        });
      });
      this.heat.replaceChildren(...cells);
      this.heat.setAttribute("aria-label", `Heat map: ${this.caption()}. A row for each query, `
        + "a column for each key; the line above the pictures reads out the selected row.");
    }

    caption() {
      const head = this.head.value === "mean" ? "mean of all heads"
        : `head ${Number(this.head.value) + 1}`;
      return `${KINDS[this.kind.value][0]}, layer ${Number(this.layer.value) + 1}, ${head}`;
    }

    drawRibbons() {
      if (!this.now) return;
      const width = this.ribbons.clientWidth;
      if (!width) return;
      const { rows } = this.now;
      const paths = [];
      rows.forEach((row, i) => row.forEach((weight, j) => {
        if (weight < LEAST) return;
        const [a, b] = [(j + 0.5) * ROW, (i + 0.5) * ROW];
        const path = svg("path", {
          d: `M0,${a} C${width / 2},${a} ${width / 2},${b} ${width},${b}`,
          "stroke-width": (1 + 11 * weight).toFixed(1),
          "stroke-opacity": (i === this.selected ? 0.3 + 0.6 * weight : 0.25 * weight).toFixed(3),
        });
        if (i === this.selected) path.classList.add("selected");
        paths.push(path);
      }));
      this.ribbons.replaceChildren(...paths);
    }

    /** Show the weights of one query, in the pictures and in words. */
    select(index, focus = false) {
      if (index < 0 || !this.now) return;
      this.selected = index;
      const { keys, queries, rows } = this.now;
      [...this.queries.children].forEach((item, i) => {
        item.setAttribute("aria-selected", i === index);
        item.tabIndex = i === index ? 0 : -1;
      });
      if (focus) this.queries.children[index].focus();
      for (const part of this.heat.querySelectorAll("[data-query]"))
        part.classList.toggle("selected", Number(part.dataset.query) === index);
      const most = Math.max(...rows[index]);
      [...this.keys.children].forEach((item, j) => {
        item.classList.toggle("attended", (rows[index][j] ?? 0) > Math.max(LEAST, most / 2));
      });
      this.drawRibbons();
      const order = rows[index].map((weight, j) => [weight, j]).sort((a, b) => b[0] - a[0]);
      const parts = order.slice(0, 3).filter(([weight]) => weight >= LEAST)
        .map(([weight, j]) => `“${shown(keys[j])}” ${percent(weight)}`);
      const step = this.kind.value === "encoder" ? null : this.steps[index];
      const chosen = step ? ` was chosen with probability ${percent(step.probability)}. To choose it,`
        + " the decoder" : "";
      const what = `“${shown(queries[index])}”${chosen} attends to ${parts.join(", ")}`;
      this.reading.textContent = `${what} (${this.caption()}).`;
    }

    move(event) {
      const last = this.now.queries.length - 1;
      const next = {
        ArrowDown: Math.min(last, this.selected + 1), ArrowRight: Math.min(last, this.selected + 1),
        ArrowUp: Math.max(0, this.selected - 1), ArrowLeft: Math.max(0, this.selected - 1),
        Home: 0, End: last,
      }[event.key];
      if (next === undefined) return;
      event.preventDefault();
      this.select(next, true);
    }

    point(event) {
      const part = event.target.closest("[data-query]");
      if (!part) return;
      const index = Number(part.dataset.query);
      const focus = event.type === "click" && part.getAttribute("role") === "option";
      if (index !== this.selected || focus) this.select(index, focus);
    }
  }

  const begin = () => document.querySelectorAll(".translator").forEach((box) => new Widget(box));
  if (document.readyState === "loading") addEventListener("DOMContentLoaded", begin);
  else begin();
})();
