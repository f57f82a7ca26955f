// The service worker: answers from the network, and without one from what earlier visits left in the cache.
// The files of models are kept by worker.js, under addresses that name their contents.

const CACHE = "bruno-page";

self.oninstall = (event) => event.waitUntil(keep());
self.onactivate = (event) => event.waitUntil(self.clients.claim());
self.onfetch = (event) => {
  const { request } = event;
  const isOurs = request.method === "GET" && new URL(request.url).origin === self.location.origin;
  if (isOurs && !request.url.includes(".gz")) event.respondWith(answer(request));
};

async function keep() {
  const { page } = await (await fetch("page.json", { cache: "no-cache" })).json();
  const cache = await caches.open(CACHE);
  await cache.addAll(["./", "page.json", ...page].map((address) => new Request(address, { cache: "no-cache" })));
  await self.skipWaiting();
}

async function answer(request) {
  const cache = await caches.open(CACHE);
  try {
    const response = await fetch(request);
    if (response.ok) await cache.put(request, response.clone());
    return response;
  } catch (error) {
    const kept = await cache.match(request, { ignoreSearch: true });
    if (kept) return kept;
    throw error;
  }
}
