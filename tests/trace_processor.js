// SPDX-License-Identifier: Apache-2.0
// node trace_processor.js ENGINE < requests > answers
//
// Runs the trace processor of ui.perfetto.dev outside a browser: ENGINE is its worker's script (engine_bundle.js), with
// its WebAssembly beside it. Requests and answers are messages of the type TraceProcessorRpcStream.
"use strict";
const fs = require("fs");
const path = require("path");

const engine = process.argv[2];
const folder = path.dirname(engine);

// What a worker has of a browser, as far as the script asks for it.
globalThis.self = globalThis;
globalThis.WorkerGlobalScope = class {};
globalThis.location = { href: "http://nowhere/" };
globalThis.XMLHttpRequest = class {
  open(method, url) {
    this.name = path.basename(url);
  }
  send() {
    this.response = fs.readFileSync(path.join(folder, this.name));
  }
};
console.log = console.error; // stdout is for the answers

new Function("process", fs.readFileSync(engine, "utf8"))(undefined); // it refuses to run where it finds node's

const port = { postMessage: (bytes) => fs.writeSync(1, bytes) };
self.onmessage({ data: port });
// Its own set-up ends in a promise, which has been kept by then.
setImmediate(() => port.onmessage({ data: new Uint8Array(fs.readFileSync(0)) }));
