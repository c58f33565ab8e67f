// One stream of server-sent events shared by all tabs of this browser, because browsers limit connections per server. The
// tab that holds a lock (the leader) has the stream and broadcasts its events. A hidden tab releases the lock.

const LOCK = "tunesmith-watch";
const RETRY_MS = 2000;
const MAX_RETRY_MS = 30000;
const EVENTS = ["metrics", "state", "versions", "votes", "reset"];

export class Feed {
  latest = new Map(); // the last message of each kind of state, for new tabs
  isOn = false;
  waiting = null; // AbortController of the request for the lock
  release = null; // releases the lock
  source = null;
  retryMs = RETRY_MS;

  /**
   * `cursor()` is the resume position, `receive(event, data)` gets each event, `connected(isOpen)` the connection state;
   * `refused()` is called if the server denies the stream. `listen` receives broadcasts of other tabs; `start`, once the
   * page knows its cursor, makes this tab a candidate for the leader; `stop` ends both.
   */
  constructor(url, callbacks) {
    Object.assign(this, { url, ...callbacks });
    this.channel = new BroadcastChannel(LOCK + url);
    this.channel.onmessage = ({ data }) => this.onMessage(data);
  }

  listen() {
    if (this.isOn) return;
    this.isOn = true;
    this.channel.postMessage({ kind: "hello" });
  }

  start() {
    if (!this.isOn || this.waiting || this.source) return;
    // Without the Web Locks API (plain HTTP from another machine) each tab has a stream of its own.
    if (!navigator.locks) {
      this.open();
      return;
    }
    const waiting = new AbortController();
    this.waiting = waiting;
    navigator.locks
      .request(LOCK + this.url, { signal: waiting.signal }, () => (waiting === this.waiting ? this.holdLock() : undefined))
      .catch((error) => {
        if (error.name !== "AbortError") throw error;
      });
  }

  stop() {
    this.isOn = false;
    this.waiting?.abort();
    this.waiting = null;
    this.close();
    this.release?.();
    this.release = null;
  }

  /** Hold the lock and the stream until `stop`. */
  holdLock() {
    this.open();
    return new Promise((resolve) => {
      this.release = resolve;
    });
  }

  open() {
    this.source = new EventSource(`${this.url}?after=${this.cursor()}`);
    this.source.onopen = () => {
      this.retryMs = RETRY_MS;
      this.publish({ kind: "line", isOpen: true });
    };
    this.source.onerror = () => {
      this.publish({ kind: "line", isOpen: false });
      // The browser reconnects by itself unless the server refused.
      if (this.source?.readyState !== EventSource.CLOSED) return;
      this.close();
      this.refused();
      setTimeout(() => {
        if (this.isOn && !this.source && (this.release || !navigator.locks)) this.open();
      }, this.retryMs);
      this.retryMs = Math.min(2 * this.retryMs, MAX_RETRY_MS);
    };
    for (const event of EVENTS) {
      this.source.addEventListener(event, ({ data }) => this.publish({ kind: "event", event, data: JSON.parse(data) }));
    }
  }

  close() {
    this.source?.close();
    this.source = null;
  }

  /** Deliver to this tab and all others; the latest state is kept for new tabs. */
  publish(message) {
    if (message.kind === "line") this.latest.set("line", message);
    if (["state", "versions", "votes"].includes(message.event)) this.latest.set(message.event, message);
    if (navigator.locks) this.channel.postMessage(message);
    this.deliver(message);
  }

  onMessage(message) {
    if (message.kind !== "hello") {
      if (this.isOn && !this.source) this.deliver(message);
      return;
    }
    if (this.source && navigator.locks) for (const kept of this.latest.values()) this.channel.postMessage(kept);
  }

  deliver(message) {
    if (message.kind === "line") this.connected(message.isOpen);
    else this.receive(message.event, message.data);
  }
}
